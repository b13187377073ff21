"""Work without benefit: operators without a backward in forward and loss, and slow patterns of autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from hotloop.core.records.profile import COUNTS, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase, SlowPattern
from hotloop.profiler.detectors import small_ops
from hotloop.profiler.detectors.code_regions import function_of, loop_functions, region_key
from hotloop.profiler.detectors.python_lines import counting_lines, is_counting_answers, metric_operators
from hotloop.profiler.detectors.step import (
    OFTEN,
    PLAIN,
    ProfiledStep,
    group_by,
    heaviest,
    is_product,
    is_random,
    module_text,
    percent,
)

_COMPUTING_PHASES: tuple[Phase, ...] = ("forward", "loss")


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


_READ_OPS = _aten("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")

_STATISTIC_OPS = _aten(
    *("mean", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "histc", "quantile", "median"),
    *("isnan", "isinf", "isfinite"),
)
"""Statistics of floating-point numbers. A loss often needs sums and maxima themselves."""

_SCALING = _aten("sub", "sub_", "mul", "mul_")

_DIVIDING = _aten("div", "div_")  # operators that normalize, for which a loss needs sums

_MAKING = _aten("arange", "linspace", "ones", "full", "zeros", "eye", "tril", "triu", "tril_indices", "triu_indices")

_KEEPING_OPS = _aten("cat", "detach")

_CHOOSING_OPS = _aten("argmax", "argmin", "topk", "multinomial")
"""Operators whose result is an index, through which no gradient passes."""

CauseAndAdvice = tuple[str, str]

_ScaledShape = tuple[tuple[str, str], str]  # A function by file and name, or a module, and the shape of a tensor there

_UNUSED = (
    "a part of the network whose graph is discarded",
    "leave it out if its output isn't used; else call it within torch.no_grad()",
)

_MEASURED = (
    "statistics or checks at each step",
    "if they only measure or check, every hundred steps; leave out hooks and assertions after debugging",
)

_MADE = (
    "masks, positions or the like, created again at each step",
    (
        "create tensors that don't depend on the batch once, as buffers of the module; create tensors that depend "
        "on samples alone with the data"
    ),
)

_KEPT = (
    "stored tensors are copied at each step",
    "a tensor of fixed size, into which each step writes its part in place",
)


def no_grad_work(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for functions, and regions of the loop, at lines without a backward.

    The profile doesn't show whether results are needed, so lines that only pass on the batch or choose from it are left
    out. Lines that sum it up count only in functions that do nothing else, or beside values read on the host. Only such
    functions count as a whole, unless they draw random numbers.
    """
    without, scaled = _operators_without_backward(step), _scaled_shapes(step)
    mixed = _mixed_functions(step, {one.where for one in without})
    for same in group_by(without, region_key(step)).values():
        whole = function_of(same[0]) not in mixed
        what, lines = _classify(same, whole, scaled)
        if lines:
            all_of_it = whole and not any(map(is_random, same))
            yield _remedy(step, what, [one for one in same if all_of_it or one.where in lines])


def _remedy(step: ProfiledStep, what: CauseAndAdvice, ones: Sequence[OperatorTime]) -> Remedy:
    spent = sum(step.cost_ms(one) for one in ones)
    where = heaviest(ones, step)
    function = function_of(next(one for one in ones if one.where == where))[1]
    place = f" ({function})" if function not in ("", "<module>") else ""
    place = module_text(ones, step) or place
    return Remedy(
        cause=f"work in the {ones[0].phase} that no gradient reaches: {what[0]}{place}",
        where=where,
        remedy=what[1],
        gain=step.share(spent),
        evidence=f"{sum(one.calls for one in ones):.0f} operations take {step.part(spent)}, "
        "and no backward goes through their lines",
    )


def _operators_without_backward(step: ProfiledStep) -> list[OperatorTime]:
    """Returns operators at lines without a backward, except those of networks in inference."""
    ones = step.operators(lambda one: bool(one.where) and one.phase in _COMPUTING_PHASES)
    if not any(one.used for one in ones):
        return []  # unknown, as in compiled graphs
    walked = {one.where for one in step.operators(lambda one: one.used is True or one.phase == "backward")}
    told = walked | small_ops.lines_in_loops(step) | {one.where for same in metric_operators(step) for one in same}
    aside = [one for one in ones if one.where not in told and one.name.startswith("aten::")]
    asked, learning = _inference_lines(step, aside), _learning_modules(step)
    return [one for one in aside if one.where not in asked and _is_in_learning_module(one, learning)]


def _mixed_functions(step: ProfiledStep, without: Set[str]) -> set[tuple[str, str]]:
    calculating = (*_COMPUTING_PHASES, "backward")
    others = step.operators(lambda one: one.phase in calculating and bool(one.where) and one.where not in without)
    return {function_of(one) for one in others} | loop_functions(step)


def _inference_lines(step: ProfiledStep, ones: Sequence[OperatorTime]) -> set[str]:
    """Returns lines that call a network without gradients, as teachers; `habits` have unused graphs."""
    graphs = any(habit.what in ("wasted forward", "unused graph") for habit in step.profile.habits)
    products = group_by((one for one in ones if is_product(one) and one.module not in PLAIN), lambda one: one.where)
    return {where for where, same in products.items() if graphs or all(one.used is None for one in same)}


def _learning_modules(step: ProfiledStep) -> set[str]:
    used = step.operators(lambda one: one.used is True and one.module not in PLAIN)
    return {name for one in used for name in _upwards(one.module)} & {one.name for one in step.profile.modules}


def _is_in_learning_module(one: OperatorTime, learning: set[str]) -> bool:
    """Returns whether an operator's module is trained, or its graph is unused."""
    if one.module in PLAIN or one.module in learning:
        return True
    return one.used is False and not learning.isdisjoint(_upwards(one.module))


def _upwards(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:many]) for many in range(len(parts), -1, -1)]


def _classify(ones: Sequence[OperatorTime], whole: bool, scaled: Set[_ScaledShape]) -> tuple[CauseAndAdvice, set[str]]:
    """Returns the operators' work and its lines; no lines if the step may need the results.

    Args:
        whole: whether the operators are all that their function does.
        scaled: inputs of normalization.
    """
    if {one.name for one in ones} & _CHOOSING_OPS and not is_counting_answers(ones):
        return _MEASURED, set()
    unused = {one.where for one in ones if one.used is False and is_product(one)}
    kinds = (_UNUSED, unused), (_MEASURED, _measured(ones, whole, scaled)), (_MADE, _made(ones))
    return next(((what, lines) for what, lines in kinds if lines), (_KEPT, _kept(ones)))


def _measured(ones: Sequence[OperatorTime], whole: bool, scaled: Set[_ScaledShape]) -> set[str]:
    counted = counting_lines(ones)
    read = {one.where for one in ones if one.name in _READ_OPS and not one.outer}
    statistics = [one for one in ones if one.name in _STATISTIC_OPS and one.dtype and not one.outer]
    summed = {one.where for one in statistics if scaled.isdisjoint(_scaled_inputs(one))}
    found = read | (summed if whole or read or counted else set())
    return found | counted if found else set()


def _made(ones: Sequence[OperatorTime]) -> set[str]:
    made = {one.where for one in ones if one.name in _MAKING and not one.outer}
    return made - {one.where for one in ones if is_random(one)}


def _kept(ones: Sequence[OperatorTime]) -> set[str]:
    kept = [one for one in ones if one.name in _KEEPING_OPS]
    return {one.where for one in kept} if {one.name for one in kept} == _KEEPING_OPS else set()


def _scaled_shapes(step: ProfiledStep) -> set[_ScaledShape]:
    """Returns values that are divided, or scaled by a tensor of another shape, as in normalization."""
    ones = step.operators(lambda one: one.phase in _COMPUTING_PHASES and not one.outer)
    scaling = [
        one for one in ones if one.name in _DIVIDING or (one.name in _SCALING and len({*one.shapes}) == len(one.shapes))
    ]
    return {each for one in scaling for each in _scaled_inputs(one)}


def _scaled_inputs(one: OperatorTime) -> set[_ScaledShape]:
    module = [("", one.module)] if one.module not in PLAIN else []
    return {(place, shape) for place in [function_of(one), *module] for shape in one.shapes}


_PATTERN_TEXTS = {
    "kept graph": (
        "a growing list of losses with graphs: the graph of each loss stays in memory",
        "keep the number: loss.item() or loss.detach()",
    ),
    "carried graph": (
        "a graph that is carried over steps: each backward runs through the graphs of earlier steps again",
        "detach what one step passes to the next: state.detach(), loss.detach()",
    ),
    "retained graph": (
        "an unneeded retain_graph: the graph is kept for a second backward that never runs",
        "leave out retain_graph=True",
    ),
    "created graph": (
        "an unneeded create_graph: the backward builds a graph of itself that no second backward uses",
        "leave out create_graph=True",
    ),
    "wasted forward": (
        "double evaluation: a forward whose result no backward uses",
        (
            "use the outputs and the loss that the step has computed already; if no gradients are needed: "
            "torch.no_grad()"
        ),
    ),
    "evaluation": (
        "evaluation at each step: a forward without gradients beside the training's own",
        "if it only measures the network: reuse the outputs of the training's forward, and validate once in an epoch "
        "or every few hundred steps",
    ),
    "unused graph": (
        "a graph is built for a forward that no backward uses",
        "call it within torch.no_grad(); if it only measures the network, every few hundred steps",
    ),
    "autograd in evaluation": (
        "evaluation builds graphs that no backward uses",
        "evaluate within torch.no_grad() or torch.inference_mode()",
    ),
    "repeated forward": (
        "a repeated forward: the network runs twice on the same inputs, with the same result",
        "reuse the outputs of the first call: out = net(x), and use them in all terms of the loss",
    ),
    "recomputed forward": (
        "forwards are computed again within the backward, because of activation checkpointing",
        "leave out torch.utils.checkpoint where memory allows, or checkpoint fewer and larger parts",
    ),
    "shared graph": (
        "two backwards run through one graph: each of them runs through the part that their losses share",
        "one backward of the sum, (a + b).backward(), which gives the same gradients",
    ),
    "unused gradients": (
        "unused gradients: no optimizer updates these parameters",
        (
            "requires_grad_(False) for parameters that aren't trained, before the loop; or call it within "
            "torch.no_grad()"
        ),
    ),
    "cleared gradients": (
        "gradients that are cleared before they are used: the backward of a loss runs through a network that the loss doesn't train, "
        "such as the generator under a discriminator's loss",
        "detach the output of that network: net(fake.detach()); retain_graph=True is then unneeded as well",
    ),
    "unread gradients": (
        "gradients of weights that are cleared before any optimizer reads them: the backward of a loss computes weight gradients of a "
        "network that the loss doesn't train, such as the discriminator under a generator's loss",
        "requires_grad_(False) for that network's parameters around this loss and its backward, or "
        "loss.backward(inputs=list(of the trained parameters))",
    ),
    "argument validation": (
        "argument validation of torch.distributions: each distribution and each log_prob checks its arguments",
        "validate_args=False for the distributions, or torch.distributions.Distribution.set_default_validate_args(False) "
        "once at the start, after debugging",
    ),
    "input gradients": (
        "gradients of the inputs are computed, because they have requires_grad",
        "leave out requires_grad if their .grad isn't used",
    ),
    "profiler": (
        "a profiler of the script's own is on",
        "profile a few steps alone, with torch.profiler.schedule, and leave it out otherwise",
    ),
    "garbage collection": (
        "Python's garbage collection at each step",
        "leave out gc.collect() in the loop; gc.freeze() after the setup excludes permanent objects from collections",
    ),
    "hook": ("torch's anomaly detection is on", "leave out torch.autograd.set_detect_anomaly(True) after debugging"),
}

_LINE_PATTERNS = ("checkpoint",)  # patterns that the detector of the function's lines reports
_SINGLE_SWITCH_PATTERNS = ("argument validation",)  # patterns that one call removes at all lines

_RARE_PATTERNS = ("autograd in evaluation", "evaluation")
"""Patterns that are reported below half of the steps: their times cover all steps."""

_INTENDED_PATTERNS = ("input gradients",)  # patterns that may be part of the method; always a note
_IF_IT_COUNTS = ("garbage collection",)  # patterns that any loop has to a small degree

_NAN_CHECK_OPS = frozenset({"aten::isnan", "aten::any", "aten::_is_any_true", "aten::is_nonzero", "aten::item"})
"""Operators of the NaN check of anomaly detection; their number differs by 1 or 2 between torch versions."""


def slow_patterns(step: ProfiledStep) -> Iterator[Remedy]:
    for habit in _merge_single_switch(step.profile.habits):
        if habit.what in _LINE_PATTERNS or (habit.per_step < OFTEN and habit.what not in _RARE_PATTERNS):
            continue
        cause, remedy = _PATTERN_TEXTS[habit.what]
        gain = step.share(_won_ms(step, habit))
        if (habit.what in _IF_IT_COUNTS or (habit.what == "evaluation" and habit.per_step < OFTEN)) and gain < COUNTS:
            continue
        yield Remedy(
            cause=cause,
            where=(habit.what == "recomputed forward" and _recomputed_line(step)) or habit.where,
            remedy=remedy,
            gain=gain,
            evidence=_pattern_evidence(step, habit),
            note=gain < COUNTS or habit.what in _INTENDED_PATTERNS,
        )


def _merge_single_switch(habits: Sequence[SlowPattern]) -> Iterator[SlowPattern]:
    """Sums patterns of all lines that a single switch removes; the line is that of the largest pattern."""
    for what, same in group_by(habits, lambda one: one.what).items():
        if what not in _SINGLE_SWITCH_PATTERNS or len(same) == 1:
            yield from same
            continue
        largest = max(same, key=lambda one: one.ms or 0.0)
        yield largest.model_copy(
            update={"per_step": sum(one.per_step for one in same), "ms": sum(one.ms or 0.0 for one in same)}
        )


def _recomputed_line(step: ProfiledStep) -> str:
    """Returns the line of forwards that run again: most of the backward's operators that equal a forward's."""
    forward = {(one.module, one.name, *one.shapes) for one in step.operators(lambda one: one.phase == "forward")}
    backward = step.operators(lambda one: one.phase == "backward" and one.module not in PLAIN)
    return heaviest([one for one in backward if (one.module, one.name, *one.shapes) in forward and one.where], step)


def _won_ms(step: ProfiledStep, habit: SlowPattern) -> float:
    if habit.what in ("autograd in evaluation", "unused graph"):  # the forward stays; its graph mainly costs memory
        return 0.0
    if habit.what == "hook":  # the mode stores the stack of each node, and checks each output
        checks = step.operators(lambda one: one.phase == "backward" and one.name in _NAN_CHECK_OPS)
        return (habit.ms or 0.0) + sum(step.cost_ms(one) for one in checks)
    if habit.what == "profiler":
        each_ms = (habit.call_us or 0.0) / 1e3 - step.launch_ms
        return max(0.0, (habit.calls or 0.0) * each_ms)
    if habit.what == "evaluation":  # the longest evaluation is assumed to use the loader's batches
        evaluations = [one for one in step.profile.habits if one.what == "evaluation"]
        if habit == max(evaluations, key=lambda one: one.ms or 0.0):
            return (habit.ms or 0.0) + step.evaluating_ms
    return habit.ms or 0.0


def _pattern_evidence(step: ProfiledStep, habit: SlowPattern) -> str:
    often = f"{habit.per_step:.0f} times in a step" if habit.per_step >= 1.5 else "at each step"
    parts = [f"recorded {often if habit.per_step >= OFTEN else 'sometimes'}"]
    if _won_ms(step, habit):
        parts.append(f"{_won_ms(step, habit):.2f} ms, {percent(step.share(_won_ms(step, habit)))} of it")
    elif habit.what == "unused graph" and step.share(habit.ms or 0.0) >= COUNTS:
        parts.append(f"the forward takes {habit.ms:.2f} ms, {percent(step.share(habit.ms or 0.0))} of it")
    else:
        parts.append("it takes almost no time here")
    if habit.bytes and habit.bytes > 0.05 * 2**20:
        parts.append(f"memory grows by {habit.bytes / 2**20:.1f} MiB each time")
    return "; ".join(parts)


def unused_functions(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for functions that run again without a backward, at lines that also run with a backward.

    Networks that are modules are left to `habits`: a teacher may run the same lines as the trained network.
    """
    if any(habit.what in ("wasted forward", "unused graph") for habit in step.profile.habits):
        return
    ones = step.operators(lambda one: one.used is not None and bool(one.where) and one.module in PLAIN)
    same = group_by(ones, lambda one: (one.where, one.name, tuple(one.shapes))).values()
    twice = [one for calls in same if {one.used for one in calls} == {True, False} for one in calls]
    unused = [one for one in twice if not one.used and one.calls >= OFTEN]
    gain = step.share(sum(step.cost_ms(one) for one in unused))
    if gain < COUNTS:
        return
    yield Remedy(
        cause="double evaluation: a function is called again, and no backward uses the result",
        where=heaviest(unused, step),
        remedy="use what the step has computed already; if no gradients are needed: torch.no_grad()",
        gain=gain,
        evidence=f"{sum(one.calls for one in unused):.0f} operations at lines whose other calls have a backward, "
        f"{percent(gain)} of the step of {step.ms:.2f} ms",
    )
