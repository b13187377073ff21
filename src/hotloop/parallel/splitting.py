"""Where a chain of pieces is cut into stages, so that the slowest is as fast as can be; plain numbers in and out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_EVEN = 1.05
"""Stages whose slowest is within 5 % of the best are taken for equal: measured times are no truer than that."""


@dataclass(frozen=True)
class Cost:
    """What one piece of a model costs.

    Attributes:
        seconds: of forward and backward for one microbatch.
        weights: bytes of its parameters, with gradients and optimizer state.
        kept: bytes that its forward pass keeps for backward, for one microbatch.
        arriving: bytes that would have to be sent to it, for one microbatch, if a stage began with it.
    """

    seconds: float
    weights: int = 0
    kept: int = 0
    arriving: int = 0


def best_cuts(
    costs: Sequence[Cost],
    stages: int,
    room: float = math.inf,
    in_flight: Callable[[int], int] = lambda stage: 1,
) -> tuple[int, ...] | None:
    """With which pieces the second, third... stage begin; None if no split has room.

    The slowest stage is within 5 % of the fastest possible; of such splits it is the one that sends least. Both are
    found exactly, by dynamic programming over (stage, end).

    Args:
        stages: how many; each gets at least one piece.
        room: bytes that a stage may take.
        in_flight: of how many microbatches a stage keeps what backward needs.
    """
    sums = _Sums(costs)

    def fits(stage: int, first: int, last: int) -> bool:
        return sums.weights(first, last) + in_flight(stage) * sums.kept(first, last) <= room

    fastest = _least(len(costs), stages, fits, sums.seconds, max)
    if fastest is None:
        return None
    limit = fastest[0] * _EVEN

    def even(stage: int, first: int, last: int) -> bool:
        return fits(stage, first, last) and sums.seconds(first, last) <= limit

    least = _least(len(costs), stages, even, lambda first, last: costs[first].arriving if first else 0, sum)
    return (least or fastest)[1]


def _least(
    pieces: int,
    stages: int,
    allowed: Callable[[int, int, int], bool],
    price: Callable[[int, int], float],
    together: Callable[[tuple[float, float]], float],
) -> tuple[float, tuple[int, ...]] | None:
    """The least price of all stages together, and where the second and later ones begin."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (paid, cuts) in best.items():
            begun = (*cuts, first) if stage else cuts
            ends = [pieces] if stage == stages - 1 else range(first + 1, pieces)
            for last in ends:
                if last <= first or not allowed(stage, first, last):
                    continue
                candidate = together((paid, price(first, last)))
                if last not in following or candidate < following[last][0]:
                    following[last] = candidate, begun
        best = following
    return best.get(pieces)


class _Sums:
    """Costs of ranges of pieces."""

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._seconds, self._weights, self._kept = (
            list(itertools.accumulate((getattr(cost, name) for cost in costs), initial=0))
            for name in ("seconds", "weights", "kept")
        )

    def seconds(self, first: int, last: int) -> float:
        return self._seconds[last] - self._seconds[first]

    def weights(self, first: int, last: int) -> float:
        return self._weights[last] - self._weights[first]

    def kept(self, first: int, last: int) -> float:
        return self._kept[last] - self._kept[first]
