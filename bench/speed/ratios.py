"""Ratios of peers' times to hotloop's, from windows of the same round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.speed.journal import Row
from bench.speed.turns import step_times
from hotloop.measuring.statistics import Ratio, ratio_of

CONFIDENCE = 0.95
_DRAWS = 2000


@dataclass(frozen=True)
class Mean:
    """A geometric mean of ratios, and its interval."""

    value: float
    low: float
    high: float
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


def geometric_mean(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Mean | None:
    """Over workloads, each of which counts by its median ratio; the interval by drawing windows anew (bootstrap)."""
    ratios = [np.asarray(theirs) / np.asarray(own) for theirs, own in pairs if len(own)]
    if not ratios:
        return None
    draws = np.random.default_rng(0)
    logs = sum(np.log(np.median(draws.choice(each, (_DRAWS, len(each))), 1)) for each in ratios) / len(ratios)
    low, high = np.quantile(np.exp(logs), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    value = math.exp(sum(math.log(float(np.median(each))) for each in ratios) / len(ratios))
    return Mean(value, float(low), float(high), len(ratios))
