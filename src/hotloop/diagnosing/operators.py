"""Operators: single ones that take more than their work needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.diagnosing.chains import written
from hotloop.diagnosing.parts import function_of
from hotloop.diagnosing.step import (
    COMPUTING,
    Step,
    draws,
    elements,
    grouped,
    heaviest,
    inside,
    is_product,
    least_of,
    percent,
)
from hotloop.profiles import OperatorTime, Remedy

MUCH = "takes much of the"
"""Said of operators that take longer than what they read and write; so do those whose memory comes anew each time."""

_BY_INDEX = ("index_put", "scatter", "index_add", "index_copy", "put_", "index_reduce", "masked_scatter")
_SUMMING = ("scatter_add", "index_add", "scatter_reduce", "index_reduce")
_ZEROING = ("aten::zero_", "aten::fill_")
_MAINLY, _AT_LEAST = 1 / 3, 0.1
"""Part that scatters must have of a line's time with floating-point numbers, and of all of it, for being what it is about."""

_FAR = 0.25
"""Of the machine's limit: an operator that reaches less is worth a look."""

_USUAL = ("conv", "mm", "linear", "pool", "norm", "softmax", "relu", "attention", "lstm", "gru", "loss")
"""Parts of the names of operators that networks are made of: how near they come to a limit is for the modules to say."""

_LARGE = 0.2
"""Share of the step that such an operator must take."""

_REACHED = 0.5
"""Of the limit is what a well-made operator reaches in practice."""


def by_index(step: Step) -> Iterator[Remedy]:
    """Scatters: numbers put one by one to where an index says; what the line does with whole numbers, it does for the index."""
    for where, ones in step.spots.items():
        for phase, same in grouped(ones, lambda one: one.phase).items():
            scatters = [one for one in same if any(part in one.name for part in _BY_INDEX)]
            spent, scattering = (sum(step.cost(one) for one in ones) for ones in (same, scatters))
            floating = sum(step.cost(one) for one in same if one.dtype and one not in scatters)
            needed = spent - floating  # what else the line calculates with stays as it is
            if not (where and scatters) or scattering < max(_MAINLY * (floating + scattering), _AT_LEAST * spent):
                continue
            zeros = _zeros(step, scatters)
            least = sum(least_of(one, step.profile) for one in [*scatters, *zeros])
            needed += sum(map(step.cost, [*zeros, *_places(step, scatters)]))
            worst = max(scatters, key=step.cost)
            yield Remedy(
                cause=f"a scatter by index in the {phase}: {worst.name}{inside(scatters, step)}",
                where=where,
                remedy=_instead(worst.name),
                gain=step.share(needed - least),
                evidence=f"{worst.name} and what it needs take {needed:.2f} ms of each step of {step.ms:.2f} ms, "
                f"where reading and writing as much takes {least:.2f} ms",
            )


def _zeros(step: Step, scatters: Sequence[OperatorTime]) -> list[OperatorTime]:
    """What makes the tensors zero that are scattered into, at other lines of the same function."""
    into = {(function_of(one), one.phase, *one.shapes[:1]) for one in scatters if one.shapes}
    lines = {one.where for one in scatters}
    return step.operators(
        lambda one: (
            one.name in _ZEROING and one.where not in lines and (function_of(one), one.phase, *one.shapes[:1]) in into
        )
    )


def _places(step: Step, scatters: Sequence[OperatorTime]) -> list[OperatorTime]:
    """What works out the index, at other lines of the same function: operators on as many whole numbers."""
    indexed = {
        (function_of(one), one.phase, elements(shape))
        for one in scatters
        for shape in one.shapes[1:]  # the first is scattered into
        if elements(shape) > 1
    }
    lines = {one.where for one in scatters}
    return step.operators(
        lambda one: (
            not one.dtype
            and one.name not in _ZEROING
            and one.where not in lines
            and any((function_of(one), one.phase, elements(shape)) in indexed for shape in one.shapes)
        )
    )


def _instead(name: str) -> str:
    """What does the work of a scatter."""
    if any(part in name for part in _SUMMING):
        return (
            "for sums over edges or groups torch.sparse.mm with a matrix of who adds to whom, or torch.segment_reduce over "
            "rows in the order of their groups; else F.embedding, or a mask"
        )
    return (
        "a mask or a built-in operation in its place (multiply by where the value was taken, torch.where, F.max_pool2d, "
        "F.embedding)"
    )


def double_precision(step: Step) -> Iterator[Remedy]:
    """float64 in the network."""
    ones = step.operators(lambda one: one.dtype == "float64")
    if not ones:
        return
    spent = sum(step.cost(one) for one in ones)
    rates = step.profile.limits.flop_per_s
    factor = min(1.0, rates["fp64"] / rates["fp32"]) if {"fp32", "fp64"} <= rates.keys() else 0.5
    calculating = [one for one in ones if one.phase in ("forward", "loss")] or ones
    yield Remedy(
        cause="float64: the network calculates in double precision",
        where=heaviest(calculating, step) or step.profile.step_where,
        remedy="float32: cast the data once where it is read (.float(), dtype=torch.float32), and leave out .double()",
        gain=step.share(sum(_gained(step, one, factor) for one in ones)),
        evidence=f"operations on float64 take {spent:.2f} ms of each step of {step.ms:.2f} ms; "
        f"this machine does {1 / factor:.1f} times as much in float32, and moves twice as many numbers; calling them takes as long",
    )


def _gained(step: Step, one: OperatorTime, factor: float) -> float:
    """Milliseconds that an operation on float64 takes more than on float32, which calculates in `factor` of the time.

    What is no product moves numbers, of half the bytes; and a call costs the same.
    """
    return (step.cost(one) - step.calling(one)) * (1 - (factor if is_product(one) else max(factor, 0.5)))


def unsupported(step: Step) -> Iterator[Remedy]:
    """Half precision on a processor that has no instructions for it."""
    for dtype, precision in (("bfloat16", "bf16"), ("float16", "fp16")):
        ones = [one for one in step.operators(lambda one: True) if one.dtype == dtype]
        rates = step.profile.limits.flop_per_s
        if not ones or not step.on_cpu or precision in rates or "fp32" not in rates:
            continue
        spent = sum(step.cost(one) for one in ones)
        least = sum(1e3 * (one.flops or 0.0) / rates["fp32"] for one in ones)
        yield Remedy(
            cause=f"{dtype} on a processor without instructions for it",
            where=heaviest(ones, step) or step.profile.step_where,
            remedy="float32: leave out .bfloat16(), .half() and autocast here",
            gain=step.share(spent - least / _REACHED),
            evidence=f"operations on {dtype} take {spent:.2f} ms of each step of {step.ms:.2f} ms; in float32 their "
            f"arithmetic takes {least:.2f} ms at this machine's limit",
            axes={"precision": "default"},
        )


def unusual(step: Step) -> Iterator[Remedy]:
    """Large operators that networks aren't made of, and that take much longer than what they read and write."""
    told = {id(one) for one in written(step)}
    ones = step.operators(
        lambda one: (
            one.phase in COMPUTING
            and one.bytes != 0
            and id(one) not in told
            and not draws(one)
            and not any(part in one.name for part in _USUAL)
        )
    )  # what moves no bytes only looks at them, and was held up
    for (where, name), same in grouped(ones, lambda one: (one.where or one.module, one.name)).items():
        least = sum(least_of(one, step.profile) for one in same)
        spent = sum(step.cost(one) for one in same)
        each = spent / max(sum(one.calls for one in same), 1e-9)
        if least > _FAR * spent * step.had_core or each < step.small_ms or step.share(spent) < _LARGE:
            continue
        worst = max(same, key=step.cost)
        yield Remedy(
            cause=f"{name} {MUCH} {worst.phase}{inside(same, step)}",
            where=where or step.profile.step_where,
            remedy="call the operation on smaller tensors or less often: the computation takes the time, not the call",
            gain=step.share(spent - least / _REACHED),
            evidence=f"it takes {spent:.2f} ms of each step of {step.ms:.2f} ms, with inputs of "
            f"{' and '.join(filter(None, worst.shapes[:2])) or 'unknown size'}"
            + (f"; this machine's limits allow {least:.2f} ms" if least else ""),
        )


def layouts(step: Step) -> Iterator[Remedy]:
    """Convolutions far from the limit: whether another layout brings them nearer, only a race tells, so Tasks alone ask."""
    ones = step.operators(lambda one: "convolution" in one.name)
    spent = sum(step.cost(one) for one in ones)
    least = sum(least_of(one, step.profile) for one in ones)
    if not step.profile.plan or not least or least > _FAR * spent * step.had_core:
        return
    yield Remedy(
        cause=f"convolutions reach {percent(least / spent)} of this machine's limit",
        where=max(ones, key=step.cost).module or heaviest(ones, step),
        remedy="try channels_last, and numbers of channels that are multiples of 16",
        gain=step.share(spent - least / _REACHED),
        evidence=f"they take {spent:.2f} ms of each step of {step.ms:.2f} ms; a race says whether the layout is why",
        axes={"layout": "channels_last"},
    )
