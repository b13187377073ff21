"""Forward and loss: work that no gradient comes back to, such as statistics, checks, and masks that are made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from hotloop.diagnosing import repeats
from hotloop.diagnosing.lines import counts_right, metrics, where_counted
from hotloop.diagnosing.parts import function_of, loop_of, part_of
from hotloop.diagnosing.step import PLAIN, Step, draws, grouped, heaviest, inside, is_product
from hotloop.profiles import OperatorTime, Phase, Remedy

_CALCULATING: tuple[Phase, ...] = ("forward", "loss")


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


_READING = _aten("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose")
_SUMMING_UP = _aten(
    *("mean", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "histc", "quantile", "median"),
    *("isnan", "isinf", "isfinite"),
)
"""Of floating-point numbers; sums and maxima, a loss often needs as they are, as the number of what a mask leaves."""

_SCALING = _aten("sub", "sub_", "mul", "mul_")
_DIVIDING = _aten("div", "div_")
"""What is normalised is summed up for."""

_MAKING = _aten("arange", "linspace", "ones", "full", "zeros", "eye", "tril", "triu", "tril_indices", "triu_indices")
_KEEPING = _aten("cat", "detach")
_CHOOSING = _aten("argmax", "argmin", "topk", "multinomial")
"""What is chosen, the network goes on with by its place, to which no gradient comes back either."""

What = tuple[str, str]
"""What it is, in words, and what to do instead."""

_Scaled = tuple[tuple[str, str], str]
"""A function by file and name, or a module, and the shape of a tensor there."""

_UNUSED = (
    "a part of the network whose graph is thrown away",
    "leave it out if nobody uses what it gives; else call it within torch.no_grad()",
)
_MEASURED = (
    "statistics or checks at each step",
    "if they only measure or check, every hundred steps; leave out hooks and assertions when all is well",
)
_MADE = (
    "masks, positions or the like, made anew at each step",
    "what doesn't depend on the batch is made once, as a buffer of the module; what depends on samples alone, with the data",
)
_KEPT = (
    "what is kept is copied at each step",
    "a tensor of fixed size, into which each step writes its part in place",
)


def without_gradient(step: Step) -> Iterator[Remedy]:
    """Functions, and stretches of the loop, that calculate at lines which no backward goes through.

    Whether their results are needed isn't seen, so what only passes the batch on, or chooses from it, isn't named; nor is
    what sums it up, but in functions that do nothing else, or beside numbers that are read. Only such functions count as a
    whole, unless they draw numbers, which are wanted anew.
    """
    without, scaled = _without(step), _scaled(step)
    mixed = _mixed(step, {one.where for one in without})
    for same in grouped(without, part_of(step)).values():
        whole = function_of(same[0]) not in mixed
        what, lines = _kind(same, whole, scaled)
        if lines:
            all_of_it = whole and not any(map(draws, same))
            yield _remedy(step, what, [one for one in same if all_of_it or one.where in lines])


def _remedy(step: Step, what: What, ones: Sequence[OperatorTime]) -> Remedy:
    spent = sum(step.cost(one) for one in ones)
    where = heaviest(ones, step)
    function = function_of(next(one for one in ones if one.where == where))[1]
    place = f" ({function})" if function not in ("", "<module>") else ""
    place = inside(ones, step) or place
    return Remedy(
        cause=f"work in the {ones[0].phase} that no gradient comes back to: {what[0]}{place}",
        where=where,
        remedy=what[1],
        gain=step.share(spent),
        evidence=f"{sum(one.calls for one in ones):.0f} operations take {spent:.2f} ms of each step of {step.ms:.2f} ms, "
        "and no backward goes through their lines",
    )


def _without(step: Step) -> list[OperatorTime]:
    """Operators at lines that no backward goes through; not those of networks that are asked without training them."""
    ones = step.operators(lambda one: bool(one.where) and one.phase in _CALCULATING)
    if not any(one.used for one in ones):
        return []  # as within compiled graphs, of which nobody knows
    walked = {one.where for one in step.operators(lambda one: one.used is True or one.phase == "backward")}
    told = walked | repeats.in_loops(step) | {one.where for same in metrics(step) for one in same}
    aside = [one for one in ones if one.where not in told and one.name.startswith("aten::")]
    asked, learning = _asked(step, aside), _learning(step)
    return [one for one in aside if one.where not in asked and _belongs(one, learning)]


def _mixed(step: Step, without: Set[str]) -> set[tuple[str, str]]:
    """Functions that calculate at other lines as well, and the loop's own."""
    calculating = (*_CALCULATING, "backward")
    others = step.operators(lambda one: one.phase in calculating and bool(one.where) and one.where not in without)
    return {function_of(one) for one in others} | loop_of(step)


def _asked(step: Step, ones: Sequence[OperatorTime]) -> set[str]:
    """Lines where a network is asked for what no gradient is needed of, as teachers are; habits tell of graphs in vain."""
    graphs = any(habit.what in ("wasted forward", "unused graph") for habit in step.profile.habits)
    products = grouped((one for one in ones if is_product(one) and one.module not in PLAIN), lambda one: one.where)
    return {where for where, same in products.items() if graphs or all(one.used is None for one in same)}


def _learning(step: Step) -> set[str]:
    """Modules that a gradient comes back to, and those around them."""
    used = step.operators(lambda one: one.used is True and one.module not in PLAIN)
    return {name for one in used for name in _upwards(one.module)} & {one.name for one in step.profile.modules}


def _belongs(one: OperatorTime, learning: set[str]) -> bool:
    """Whether an operator is none of a module's that doesn't learn, unless its graph is thrown away."""
    if one.module in PLAIN or one.module in learning:
        return True
    return one.used is False and not learning.isdisjoint(_upwards(one.module))


def _upwards(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:many]) for many in range(len(parts), -1, -1)]


def _kind(ones: Sequence[OperatorTime], whole: bool, scaled: Set[_Scaled]) -> tuple[What, set[str]]:
    """What such operators do, and at which lines; at none where the rest of the step may need it.

    Args:
        whole: whether they are all that their function does.
        scaled: what is normalised.
    """
    if {one.name for one in ones} & _CHOOSING and not counts_right(ones):
        return _MEASURED, set()
    kinds = (_UNUSED, _unused(ones)), (_MEASURED, _measured(ones, whole, scaled)), (_MADE, _made(ones))
    return next(((what, lines) for what, lines in kinds if lines), (_KEPT, _kept(ones)))


def _unused(ones: Sequence[OperatorTime]) -> set[str]:
    return {one.where for one in ones if one.used is False and is_product(one)}


def _measured(ones: Sequence[OperatorTime], whole: bool, scaled: Set[_Scaled]) -> set[str]:
    counted = where_counted(ones)
    read = {one.where for one in ones if one.name in _READING and not one.outer}
    summed = {one.where for one in ones if _sums_up(one) and scaled.isdisjoint(_scaling(one))}
    found = read | (summed if whole or read or counted else set())
    return found | counted if found else set()


def _made(ones: Sequence[OperatorTime]) -> set[str]:
    made = {one.where for one in ones if one.name in _MAKING and not one.outer}
    return made - {one.where for one in ones if draws(one)}


def _kept(ones: Sequence[OperatorTime]) -> set[str]:
    kept = [one for one in ones if one.name in _KEEPING]
    return {one.where for one in kept} if {one.name for one in kept} == _KEEPING else set()


def _sums_up(one: OperatorTime) -> bool:
    return one.name in _SUMMING_UP and bool(one.dtype) and not one.outer


def _scaled(step: Step) -> set[_Scaled]:
    """What is moved or scaled by something of another shape, as what is normalised, and whatever is divided."""
    ones = step.operators(lambda one: one.phase in _CALCULATING and not one.outer)
    scaling = [
        one for one in ones if one.name in _DIVIDING or (one.name in _SCALING and len({*one.shapes}) == len(one.shapes))
    ]
    return {each for one in scaling for each in _scaling(one)}


def _scaling(one: OperatorTime) -> set[_Scaled]:
    """The shapes of an operator's inputs, with the function and the module in which it stands."""
    module = [("", one.module)] if one.module not in PLAIN else []
    return {(place, shape) for place in [function_of(one), *module] for shape in one.shapes}
