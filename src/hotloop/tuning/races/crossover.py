"""From which size on a plan pays, and what decides it: a function of the times measured at several sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hotloop.core.records.race import Crossover, Timing

Point = tuple[float, Timing]
"""A size, and what a plan took there."""

_FLAT_EXPONENT = 0.25
"""A time that grows with less than this power of the size doesn't come from work that grows with it."""

_FEED_BOUND_SHARE = 0.5
"""Share of a step from which on fetching its batch decides how long it takes."""


def crossovers(name: str, own: Sequence[Point], baseline: Sequence[Point]) -> list[Crossover]:
    """Where the plan and the baseline take the same time, between sizes at which one and the other was shown to be faster.

    Args:
        own, baseline: at the same sizes, above zero and increasing; where one failed, it is left out.

    Returns:
        One for each place; one without a place where there is none.
    """
    raced = [(size, timing) for size, timing in own if timing.ratio is not None]
    reason = _reason(name, raced, [(size, timing) for size, timing in baseline if timing.step_ms is not None])
    sure = [place for place, (_, timing) in enumerate(raced) if timing.verdict in ("faster", "slower")]
    turns = [raced[a : b + 1] for a, b in pairwise(sure) if raced[a][1].verdict != raced[b][1].verdict]
    return [_crossover(name, turn, reason) for turn in turns] or [Crossover(name=name, at=None, reason=reason)]


def _crossover(name: str, turn: Sequence[Point], reason: str) -> Crossover:
    """From a size at which one was faster to one at which the other was; those between are undecided."""
    median, low, high = (
        _crossover_sizes([(size, value) for size, timing in turn if (value := getattr(timing, edge)) is not None])
        for edge in ("ratio", "ratio_low", "ratio_high")
    )
    ends = [*median, *low, *high]
    return Crossover(
        name=name,
        at=median[0],
        low=min(ends),
        high=max(ends),
        faster="above" if turn[-1][1].verdict == "faster" else "below",
        reason=reason,
    )


def _crossover_sizes(points: Sequence[tuple[float, float]]) -> list[float]:
    """The sizes at which a ratio passes 1, its logarithm taken as straight in that of the size between two of them."""
    known = [(math.log(size), math.log(ratio)) for size, ratio in points]
    return [
        math.exp(size + (larger - size) * before / (before - after))
        for (size, before), (larger, after) in pairwise(known)
        if before * after < 0 or after == 0
    ]


def _reason(name: str, own: Sequence[Point], baseline: Sequence[Point]) -> str:
    """What decides, as far as times alone tell."""
    if len(own) < 2 or len(baseline) < 2:
        return "too few sizes were measured to tell what decides"
    return "; ".join(f"{who}: {_describe_bounds(points)}" for who, points in ((name, own), ("the baseline", baseline)))


def _describe_bounds(points: Sequence[Point]) -> str:
    """What bounds one plan's step from the smallest to the largest size.

    A step waits for its batch where fetching and copying take most of its time. It is bound by overhead, which is what
    asking for operations costs (Python, launches on a GPU, threads that wait for each other), where its time doesn't grow with the size; else by the
    arithmetic and the memory traffic that grow with it.
    """
    parts = [(small[0], large[0], _describe_bound(small, large)) for small, large in pairwise(points)]
    if len({bound for _, _, bound in parts}) == 1:
        return parts[0][2]
    told: list[str] = []
    for number, (size, to, bound) in enumerate(parts):
        if number and bound == parts[number - 1][2]:
            told[-1] = told[-1].rpartition(" to ")[0] + f" to {to:g}"
        else:
            told.append(f"{bound} from {size:g} to {to:g}")
    return ", ".join(told)


def _describe_bound(small: Point, large: Point) -> str:
    (size, before), (larger, after) = small, large
    assert before.step_ms is not None and after.step_ms is not None
    if (after.feed_ms or 0.0) > _FEED_BOUND_SHARE * after.step_ms:
        return "the copy and loading of batches decide"
    growth = math.log(after.step_ms / before.step_ms) / math.log(larger / size)
    return (
        "launches, Python and threads decide, its time hardly grows"
        if growth < _FLAT_EXPONENT
        else "arithmetic and memory decide"
    )
