"""The size from which a plan pays, and why: a function of the times at several sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from hotloop.core.records.race import Crossover, Timing

Point = tuple[float, Timing]
"""A size, and a plan's Timing at this size."""

_FLAT_EXPONENT = 0.25
"""Exponent of the size below which a step's time is overhead, not work that grows with the size."""

_FEED_BOUND_SHARE = 0.5
"""Share of a step's time from which fetching the batch determines the step."""


def crossovers(name: str, own: Sequence[Point], baseline: Sequence[Point]) -> list[Crossover]:
    """Returns the sizes at which plan and baseline take the same time; one Crossover without a size if there is none.

    Args:
        own, baseline: at the same increasing sizes above zero; failures are left out.
    """
    raced = [(size, timing) for size, timing in own if timing.ratio is not None]
    reason = _reason(name, raced, [(size, timing) for size, timing in baseline if timing.step_ms is not None])
    sure = [place for place, (_, timing) in enumerate(raced) if timing.verdict in ("faster", "slower")]
    turns = [raced[a : b + 1] for a, b in pairwise(sure) if raced[a][1].verdict != raced[b][1].verdict]
    return [_crossover(name, turn, reason) for turn in turns] or [Crossover(name=name, at=None, reason=reason)]


def _crossover(name: str, turn: Sequence[Point], reason: str) -> Crossover:
    """Returns the crossover between the ends of `turn`, whose verdicts are opposite; those between are undecided."""
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
    """Returns the sizes at which a ratio passes 1, by linear interpolation of logarithms."""
    known = [(math.log(size), math.log(ratio)) for size, ratio in points]
    return [
        math.exp(size + (larger - size) * before / (before - after))
        for (size, before), (larger, after) in pairwise(known)
        if before * after < 0 or after == 0
    ]


def _reason(name: str, own: Sequence[Point], baseline: Sequence[Point]) -> str:
    if len(own) < 2 or len(baseline) < 2:
        return "too few sizes were measured to name what decides"
    return "; ".join(f"{who}: {_describe_bounds(points)}" for who, points in ((name, own), ("the baseline", baseline)))


def _describe_bounds(points: Sequence[Point]) -> str:
    """Returns what bounds a plan's step from the smallest to the largest size.

    The bound is the batch if fetching and copying take most of the time; overhead (Python, launches, waits) if the time doesn't grow with the size; else arithmetic and memory traffic.
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
