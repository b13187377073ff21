"""Forward and loss: work that no gradient comes back to, such as statistics, checks, and masks that are made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.diagnosing import repeats
from hotloop.diagnosing.lines import counts_right
from hotloop.diagnosing.parts import function_of, part_of
from hotloop.diagnosing.step import PLAIN, Step, grouped, heaviest, is_product
from hotloop.profiles import OperatorTime, Phase, Remedy

_CALCULATING: tuple[Phase, ...] = ("forward", "loss")


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


_READING = _aten("item", "_local_scalar_dense", "is_nonzero")
_SUMMING_UP = _aten(
    *("mean", "std", "var", "std_mean", "var_mean", "norm", "linalg_vector_norm", "histc", "quantile", "median"),
    *("isnan", "isinf", "isfinite"),
)
"""Of floating-point numbers; sums and maxima, a loss often needs as they are, as the number of what a mask leaves."""

_MAKING = _aten("arange", "linspace", "ones", "full", "zeros", "eye", "tril", "triu", "tril_indices", "triu_indices")
_KEEPING = _aten("cat", "detach")
_CHOOSING = _aten("argmax", "argmin", "topk", "multinomial")
"""What is chosen, the network goes on with by its place, to which no gradient comes back either."""

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

    Whether their results are needed isn't seen, so what only passes the batch on, or chooses from it, isn't named.
    """
    for same in grouped(_without(step), part_of(step)).values():
        if (what := _kind(same)) is None:
            continue
        spent = sum(step.cost(one) for one in same)
        where = heaviest(same, step)
        function = function_of(next(one for one in same if one.where == where))[1]
        place = f" ({function})" if function not in ("", "<module>") else ""
        yield Remedy(
            cause=f"work in the {same[0].phase} that no gradient comes back to: {what[0]}{place}",
            where=where,
            remedy=what[1],
            gain=step.share(spent),
            evidence=f"{sum(one.calls for one in same):.0f} operations take {spent:.2f} ms of each step of {step.ms:.2f} ms, "
            "and no backward goes through their lines",
        )


def _without(step: Step) -> list[OperatorTime]:
    """Operators at lines that no backward goes through; not those of networks that are asked without training them."""
    ones = step.operators(lambda one: bool(one.where) and one.phase in _CALCULATING)
    if not any(one.used for one in ones):
        return []  # as within compiled graphs, of which nobody knows
    walked = {one.where for one in step.operators(lambda one: one.used is True or one.phase == "backward")}
    told = walked | repeats.in_loops(step)
    aside = [one for one in ones if one.where not in told and one.name.startswith("aten::")]
    asked, learning = _asked(step, aside), _learning(step)
    return [one for one in aside if one.where not in asked and _belongs(one, learning)]


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


def _kind(ones: Sequence[OperatorTime]) -> tuple[str, str] | None:
    """What such operators do, and what to do instead; None where the rest of the step may need it."""
    names = {one.name for one in ones}
    if names & _CHOOSING and not counts_right(ones):
        return None
    if any(one.used is False and is_product(one) for one in ones):
        return _UNUSED
    if names & _READING or _SUMMING_UP & {one.name for one in ones if one.dtype}:
        return _MEASURED
    if names & _MAKING:
        return _MADE
    return _KEPT if names >= _KEEPING else None
