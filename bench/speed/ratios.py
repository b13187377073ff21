"""Ratios of peers' times to hotloop's, from windows of the same round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.speed.journal import Row
from bench.speed.turns import step_times
from hotloop.tuning.races.statistics import Ratio, ratio_of

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A geometric mean of ratios, and its interval; None where one of the ratios has none."""

    value: float
    low: float | None
    high: float | None
    of: int


def paired(rows: Sequence[Row], one: str, other: str) -> tuple[list[float], list[float]]:
    """Seconds of a step of two peers, window by window, over all sessions in which both were measured."""
    pairs = [
        pair
        for row in rows
        if one in row["lanes"] and other in row["lanes"]
        for pair in zip(step_times(row["lanes"][one]), step_times(row["lanes"][other]), strict=False)
    ]
    return [first for first, _ in pairs], [second for _, second in pairs]


def ratio(rows: Sequence[Row], peer: str, ours: str) -> Ratio | None:
    """The peer's time over ours: above 1 we are faster. None where they never met."""
    theirs, own = paired(rows, peer, ours)
    return ratio_of(theirs, own, CONFIDENCE) if theirs else None


def geometric_mean(ratios: Sequence[Ratio]) -> Mean | None:
    """Over workloads; its interval from theirs, which are independent, on the scale of logarithms."""
    if not ratios:
        return None
    middle = sum(math.log(one.median) for one in ratios) / len(ratios)
    known = [(one.median, one.low, one.high) for one in ratios if one.low is not None and one.high is not None]
    if len(known) < len(ratios):
        return Mean(math.exp(middle), None, None, len(ratios))
    below = math.hypot(*(math.log(median / low) for median, low, _ in known)) / len(ratios)
    above = math.hypot(*(math.log(high / median) for median, _, high in known)) / len(ratios)
    return Mean(math.exp(middle), math.exp(middle - below), math.exp(middle + above), len(ratios))
