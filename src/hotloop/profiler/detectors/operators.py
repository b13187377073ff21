"""Slow operators: avoidable products, scatters, growing tensors, unsuitable dtypes, and those far from the machine's limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from hotloop.core.records.profile import COUNTS, TAKE_ROWS, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.code_regions import function_of
from hotloop.profiler.detectors.small_ops import chain_operators
from hotloop.profiler.detectors.step import (
    ASIDE_PHASES,
    COMPUTING_PHASES,
    ProfiledStep,
    count_elements,
    group_by,
    heaviest,
    is_product,
    is_random,
    module_text,
    operator_least_ms,
    percent,
)

_COMPUTING_PHASES: tuple[Phase, ...] = ("forward", "loss", "batch")

_LINEAR = frozenset(f"aten::{name}" for name in ("add", "add_", "sub", "mul", "mul_", "div", "neg", "t", "transpose"))
"""Operators after which a product of two matrices can still be separated, if only scalars scale it."""

_PRODUCT_WRAPPERS = ("aten::matmul", "aten::linear", "aten::einsum")  # operators that only call a product

Size = tuple[int, ...]


def one_hot_matmul(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for products with one-hot matrices."""
    for size, making in _one_hots(step):
        with_it = _products_with(step, size)
        if not with_it:
            continue
        related = [*making, *_other_work_on(step, making, size), *with_it]
        ones = list({id(one): one for one in related}.values())
        spent = sum(step.cost_ms(one) for one in ones)
        yield Remedy(
            cause=f"rows are looked up by a product with a one-hot matrix of {_format_size(size)}, of which all but 1 in "
            f"{size[-1]} are zero",
            where=heaviest([one for one in ones if one.phase != "backward"], step),
            remedy="index the rows: torch.nn.functional.embedding(indices, table), or table[indices]; "
            "for sums by group index_add",
            gain=step.share((1 - 1 / size[-1]) * spent),
            evidence=f"making the matrix and the products with it take {step.part(spent)}",
        )


def _products_with(step: ProfiledStep, size: Size) -> list[OperatorTime]:
    """Returns the products with a matrix of that size, and their backward.

    Lines where the matrix has a gradient are left out: it isn't one-hot. Logits have the size of their targets.
    """
    products = step.operators(lambda one: is_product(one) and one.name not in _PRODUCT_WRAPPERS)
    forward = [one for one in products if one.phase in _COMPUTING_PHASES and _has_input_of(one, size)]
    lines = {one.where for one in forward}
    with_it = [*forward, *(one for one in products if one.phase == "backward" and one.where in lines)]
    giving = {one.where for one in with_it if _has_result_of(one, size)}
    return [one for one in with_it if one.where not in giving and _has_input_of(one, size)]


def _has_input_of(one: OperatorTime, size: Size) -> bool:
    return any(_is_flattened(each, size) for each in _sizes(one))


def _has_result_of(one: OperatorTime, size: Size) -> bool:
    factors = _sizes(one)[-2:]
    return len(factors) == 2 and _is_flattened((*factors[0][:-1], factors[1][-1]), size)


def _one_hots(step: ProfiledStep) -> list[tuple[Size, list[OperatorTime]]]:
    """Returns the sizes of one-hot matrices, and the operators that make each."""
    found: dict[Size, list[OperatorTime]] = {}
    for one in step.operators(lambda one: one.phase in _COMPUTING_PHASES):
        for size in {*_scattered_sizes(one), *_compared_sizes(one), *_identity_rows(step, one)}:
            found.setdefault(size, []).append(one)
    return list(found.items())


def _scattered_sizes(one: OperatorTime) -> Iterator[Size]:
    """Yields the size of a tensor into which one value per row is scattered."""
    sizes = [_size(shape) for shape in one.shapes[:2]]
    if one.name.startswith("aten::scatter") and len(sizes) > 1:
        whole, index = sizes
        if len(whole) > 1 and index == (*whole[:-1], 1):
            yield whole


def _compared_sizes(one: OperatorTime) -> Iterator[Size]:
    """Yields the size of a comparison of indices with a range; equal columns may be any pairs."""
    sizes = [_size(shape) for shape in one.shapes[:2]]
    if one.name != "aten::eq" or len(sizes) < 2:
        return
    for index, row in (sizes, sizes[::-1]):
        if index[-1:] == (1,) and row[-1:] == (prod(row),) and prod(index) > 1 < prod(row) != prod(index):
            yield (*index[:-1], prod(row))


def _identity_rows(step: ProfiledStep, one: OperatorTime) -> Iterator[Size]:
    """Yields the sizes of products with rows of an identity matrix, whose number is unknown."""
    if one.name not in TAKE_ROWS or one.shapes[:1] not in [[shape] for shape in step.profile.identities]:
        return
    whole, function = _size(one.shapes[0]), function_of(one)
    for product in step.operators(lambda each: is_product(each) and each.phase in _COMPUTING_PHASES):
        if function_of(product) == function:
            yield from (size for size in _sizes(product) if size[-1] == whole[-1] and size != whole)


def _other_work_on(step: ProfiledStep, making: Sequence[OperatorTime], size: Size) -> list[OperatorTime]:
    """Returns other work of the same functions on the whole matrix, such as zero fills and casts."""
    functions = {function_of(one) for one in making}
    return step.operators(lambda one: _format_size(size) in one.shapes and function_of(one) in functions)


def _format_size(size: Size) -> str:
    return "x".join(map(str, size))


def _is_flattened(size: Size, whole: Size) -> bool:
    """Returns whether a product's operand is the tensor with flattened rows, possibly transposed."""
    return prod(size) == prod(whole) and whole[-1] in (size[-1], size[-2] if len(size) > 1 else 0)


def expanded_low_rank(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for weights multiplied from two thin factors, if fewer rows use them than they have.

    An adapter of low rank (Hu et al., LoRA, 2021, section 4.1) does so if it is added to the weight at each step.
    """
    found: list[tuple[OperatorTime, float]] = []
    for ones in group_by(step.operators(lambda one: True), lambda one: one.module).values():
        for thin in ones:
            full = _product_size(thin)
            rows = _multiplied_rows(ones, full, thin) if full and _is_linear(ones, full) else 0
            spared = 1 - rows * sum(full) / prod(full)
            if rows and spared > 0:
                found += [(one, spared) for one in ones if _is_making(one, full, thin)]
    if found:
        spent = sum(step.cost_ms(one) for one, _ in found)
        full = next(filter(None, (_product_size(one) for one, _ in found)))
        yield Remedy(
            cause=f"a weight of {full[0]}x{full[1]} is multiplied out from two thin factors at each step",
            where=heaviest([one for one, _ in found if one.phase != "backward"], step),
            remedy="multiply the rows with the thin factors one after the other, and add the result to the layer's "
            "output: (x @ A.T) @ B.T",
            gain=step.share(sum(spared * step.cost_ms(one) for one, spared in found)),
            evidence=f"making the weight, and its gradient, take {step.part(spent)}, and "
            "the batch has fewer rows than the weight",
        )


def _product_size(one: OperatorTime) -> Size:
    """Returns the size of the product of two thin matrices; empty for other operators."""
    sizes = _sizes(one)
    if one.name != "aten::mm" or one.phase != "forward" or [len(size) for size in sizes] != [2, 2]:
        return ()
    (rows, inner), (_, columns) = sizes
    return (rows, columns) if 2 * inner <= min(rows, columns) else ()


def _is_linear(ones: Sequence[OperatorTime], full: Size) -> bool:
    """Returns whether a module, beside products, only scales and adds the weight."""
    on_it = [one for one in ones if one.phase == "forward" and full in _sizes(one) and not _is_multiplication(one)]
    moving = [one for one in on_it if one.bytes or one.bytes is None]
    scaling = ("aten::mul", "aten::mul_", "aten::div")
    return all(one.name in _LINEAR and not (one.name in scaling and len(_sizes(one)) > 1) for one in moving)


def _is_multiplication(one: OperatorTime) -> bool:
    return is_product(one) or one.name in _PRODUCT_WRAPPERS


def _multiplied_rows(ones: Sequence[OperatorTime], full: Size, thin: OperatorTime) -> int:
    """Returns how many rows a module multiplies with the weight; 0 if it is no factor."""
    forward = [one for one in ones if one is not thin and one.phase == "forward" and is_product(one)]
    sizes = [_sizes(one)[-2:] for one in forward if one.name not in _PRODUCT_WRAPPERS]
    return max((prod(rows[:-1]) for rows, *by in sizes if by and sorted(by[0]) == sorted(full)), default=0)


def _is_making(one: OperatorTime, full: Size, thin: OperatorTime) -> bool:
    """Returns whether an operator makes the weight, or separates its gradient."""
    sizes = _sizes(one)
    if _is_multiplication(one):
        factors = [sorted(size) for size in _sizes(thin)]
        if one.phase == "forward":
            return one.where == thin.where and [sorted(size) for size in sizes] == factors
        both = sorted(full) in map(sorted, sizes) and any(sorted(size) in factors for size in sizes)
        return one.phase == "backward" and one.where == thin.where and len(sizes) == 2 and both
    return bool(sizes) and all(sorted(size) == sorted(full) for size in sizes) and one.phase in ("forward", "backward")


def _sizes(one: OperatorTime) -> list[Size]:
    return [size for shape in one.shapes if (size := _size(shape))]


def _size(shape: str) -> Size:
    """Returns a tensor's size; empty for scalars and lists of tensors."""
    parts = shape.split("x")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


TAKES_MUCH = "takes much of the"
"""Part of the cause for operators far slower than their memory traffic; page faults are another reason."""

_INDEX_OPS = ("index_put", "scatter", "index_add", "index_copy", "put_", "index_reduce", "masked_scatter")

_SUMMING_OPS = ("scatter_add", "index_add", "scatter_reduce", "index_reduce")

_ZEROING = ("aten::zero_", "aten::fill_")

_MAIN_SHARE, _MIN_SHARE = 1 / 3, 0.1
"""Least share of scatters in a line's floating-point time, and in its whole time, to be reported as its cause."""

_FAR = 0.25  # share of the machine's limit below which an operator is slow

_COMMON_OPS = ("conv", "mm", "linear", "pool", "norm", "softmax", "relu", "attention", "lstm", "gru", "loss")
"""Name parts of networks' operators; the modules have their shares of the limit."""

_LARGE = 0.2  # least share of the step for a slow operator
_PRACTICAL_LIMIT = 0.5  # share of the limit that a good operator reaches in practice


def index_scatter(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for scatters. Work of the line on integers counts as work for the index."""
    for where, ones in step.operators_by_line.items():
        for phase, same in group_by(ones, lambda one: one.phase).items():
            scatters = [one for one in same if any(part in one.name for part in _INDEX_OPS)]
            spent, scattering = (sum(step.cost_ms(one) for one in ones) for ones in (same, scatters))
            floating = sum(step.cost_ms(one) for one in same if one.dtype and one not in scatters)
            needed = spent - floating  # the line's other inputs keep their dtype
            if not (where and scatters) or scattering < max(_MAIN_SHARE * (floating + scattering), _MIN_SHARE * spent):
                continue
            zeros = _zero_fills(step, scatters)
            least = sum(operator_least_ms(one, step.profile) for one in [*scatters, *zeros])
            needed += sum(map(step.cost_ms, [*zeros, *_index_operators(step, scatters)]))
            worst = max(scatters, key=step.cost_ms)
            yield Remedy(
                cause=f"a scatter by index in the {phase}: {worst.name}{module_text(scatters, step)}",
                where=where,
                remedy=_scatter_advice(worst.name),
                gain=step.share(needed - least),
                evidence=f"{worst.name} and the operations for it take {step.part(needed)}; "
                f"reading and writing the same bytes takes {least:.2f} ms",
            )


def _zero_fills(step: ProfiledStep, scatters: Sequence[OperatorTime]) -> list[OperatorTime]:
    """Returns the zero fills of the scatters' targets, at other lines of the same function."""
    into = {(function_of(one), one.phase, *one.shapes[:1]) for one in scatters if one.shapes}
    lines = {one.where for one in scatters}
    return step.operators(
        lambda one: (
            one.name in _ZEROING and one.where not in lines and (function_of(one), one.phase, *one.shapes[:1]) in into
        )
    )


def _index_operators(step: ProfiledStep, scatters: Sequence[OperatorTime]) -> list[OperatorTime]:
    """Returns operators on as many integers as the index has, at other lines of the same function."""
    indexed = {
        (function_of(one), one.phase, count_elements(shape))
        for one in scatters
        for shape in one.shapes[1:]  # the first is the target
        if count_elements(shape) > 1
    }
    lines = {one.where for one in scatters}
    return step.operators(
        lambda one: (
            not one.dtype
            and one.name not in _ZEROING
            and one.where not in lines
            and any((function_of(one), one.phase, count_elements(shape)) in indexed for shape in one.shapes)
        )
    )


def _scatter_advice(name: str) -> str:
    if any(part in name for part in _SUMMING_OPS):
        return (
            "for sums over edges or groups torch.sparse.mm with an adjacency matrix, or torch.segment_reduce "
            "over rows in the order of their groups; else F.embedding, or a mask"
        )
    return (
        "a mask or a built-in operation in its place (a product with the mask of the positions, torch.where, "
        "F.max_pool2d, F.embedding)"
    )


def double_precision(step: ProfiledStep) -> Iterator[Remedy]:
    ones = step.operators(lambda one: one.dtype == "float64")
    if not ones:
        return
    spent = sum(step.cost_ms(one) for one in ones)
    rates = step.profile.limits.flop_per_s
    factor = min(1.0, rates["fp64"] / rates["fp32"]) if {"fp32", "fp64"} <= rates.keys() else 0.5
    calculating = [one for one in ones if one.phase in ("forward", "loss")] or ones
    yield Remedy(
        cause="float64: the network calculates in double precision",
        where=heaviest(calculating, step) or step.profile.step_where,
        remedy="float32: cast the data once where it is read (.float(), dtype=torch.float32), and leave out .double()",
        gain=step.share(sum(_float64_extra_ms(step, one, factor) for one in ones)),
        evidence=f"operations on float64 take {step.part(spent)}; this machine does "
        f"{1 / factor:.1f} times as much in float32, and moves twice as many numbers; the calls take as long",
    )


def _float64_extra_ms(step: ProfiledStep, one: OperatorTime, factor: float) -> float:
    """Returns the milliseconds beyond float32, which computes products in `factor` of the time.

    Other operators move half the bytes; calls cost the same.
    """
    return (step.cost_ms(one) - step.calling_ms(one)) * (1 - (factor if is_product(one) else max(factor, 0.5)))


def unsupported_precision(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for half precision on a CPU without instructions for it."""
    for dtype, precision in (("bfloat16", "bf16"), ("float16", "fp16")):
        ones = [one for one in step.operators(lambda one: True) if one.dtype == dtype]
        rates = step.profile.limits.flop_per_s
        if not ones or not step.on_cpu or precision in rates or "fp32" not in rates:
            continue
        spent = sum(step.cost_ms(one) for one in ones)
        least = sum(1e3 * (one.flops or 0.0) / rates["fp32"] for one in ones)
        yield Remedy(
            cause=f"{dtype} on a processor without instructions for it",
            where=heaviest(ones, step) or step.profile.step_where,
            remedy="float32: leave out .bfloat16(), .half() and autocast here",
            gain=step.share(spent - least / _PRACTICAL_LIMIT),
            evidence=f"operations on {dtype} take {step.part(spent)}; in float32 their "
            f"arithmetic takes {least:.2f} ms at this machine's limit",
            axes={"precision": "default"},
        )


def slow_operators(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for large, uncommon operators that take much longer than their memory traffic."""
    told = {id(one) for one in chain_operators(step)}
    ones = step.operators(
        lambda one: (
            one.phase in COMPUTING_PHASES
            and one.bytes != 0
            and id(one) not in told
            and not is_random(one)
            and not any(part in one.name for part in _COMMON_OPS)
        )
    )  # views move no bytes: their time is a delay
    for (where, name), same in group_by(ones, lambda one: (one.where or one.module, one.name)).items():
        least = sum(operator_least_ms(one, step.profile) for one in same)
        spent = sum(step.cost_ms(one) for one in same)
        each = spent / max(sum(one.calls for one in same), 1e-9)
        if least > _FAR * spent * step.core_share or each < step.small_ms or step.share(spent) < _LARGE:
            continue
        worst = max(same, key=step.cost_ms)
        yield Remedy(
            cause=f"{name} {TAKES_MUCH} {worst.phase}{module_text(same, step)}",
            where=where or step.profile.step_where,
            remedy="call the operation on smaller tensors or less often: the computation takes the time, not the call",
            gain=step.share(spent - least / _PRACTICAL_LIMIT),
            evidence=f"it takes {step.part(spent)}, with inputs of "
            f"{' and '.join(filter(None, worst.shapes[:2])) or 'unknown size'}"
            + (f"; this machine's limits allow {least:.2f} ms" if least else ""),
        )


def slow_layouts(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for convolutions far from the limit, for Tasks only: a race must measure the layout."""
    ones = step.operators(lambda one: "convolution" in one.name)
    spent = sum(step.cost_ms(one) for one in ones)
    least = sum(operator_least_ms(one, step.profile) for one in ones)
    if not step.profile.plan or not least or least > _FAR * spent * step.core_share:
        return
    yield Remedy(
        cause=f"convolutions reach {percent(least / spent)} of this machine's limit",
        where=max(ones, key=step.cost_ms).module or heaviest(ones, step),
        remedy="try channels_last, and numbers of channels that are multiples of 16",
        gain=step.share(spent - least / _PRACTICAL_LIMIT),
        evidence=f"they take {step.part(spent)}; a race measures whether the layout is the cause",
        axes={"layout": "channels_last"},
    )


CONCATENATION = "tensors are concatenated in the loop, by a copy of all their numbers (torch.cat, torch.stack)"
"""The cause of a concatenation whose result has the same size at each step."""

_CONCATENATING = ("aten::cat", "aten::stack", "aten::hstack", "aten::vstack", "aten::concat", "aten::concatenate")

_JOINING_SHARE = 0.5  # share of the time of a line's operators from which concatenation is the line's main work


def concatenation_in_loop(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for each line outside the training step that mainly concatenates tensors."""
    operators = step.operators(lambda one: one.phase in ASIDE_PHASES and bool(one.where) and one.used is not True)
    for where, same_line in group_by(operators, lambda one: one.where).items():
        joining = [one for one in same_line if one.name in _CONCATENATING or one.outer in _CONCATENATING]
        spent = sum(map(step.cost_ms, joining))
        if not joining or spent < _JOINING_SHARE * sum(map(step.cost_ms, same_line)):
            continue
        spent = max(spent, step.aside_ms.get(where, 0.0))
        if step.share(spent) < COUNTS:
            continue
        grows = _grows(joining)
        yield Remedy(
            cause="a buffer that grows at each step is copied as a whole (torch.cat, torch.stack)"
            if grows
            else CONCATENATION,
            where=where,
            remedy="a tensor of its final size, made before the loop, into which each step writes its part in place: "
            "buffer[n : n + len(new)] = new; for a buffer that drops its oldest part, a position that "
            "restarts at 0 after the end"
            if grows
            else "for a buffer that grows or slides: make a tensor before the loop, and write each step's part "
            "into it in place; for parts that don't change: concatenate them once, before the loop",
            gain=step.share(spent),
            evidence=f"{sum(one.calls for one in joining):.0f} operations take {step.part(spent)}",
        )


def _grows(operators: Sequence[OperatorTime]) -> bool:
    """Whether the same call receives different shapes in different steps."""
    return any(
        len({tuple(one.shapes) for one in same}) > 1 and all(one.calls < 1 for one in same)
        for same in group_by(operators, lambda one: (one.name, one.outer)).values()
    )
