"""How many times as fast a GPU is as the CPU at hand, with its interval, and the batch from which the GPU pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Step = tuple[float, float, float]
"""Milliseconds of a step: the median and the ends of the 90 % interval."""


@dataclass(frozen=True)
class Speedup:
    """The CPU's step divided by the GPU's, with its 90 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, cpu: Step, gpu: Step) -> Speedup:
        """Returns the ratio of two steps whose errors are independent."""
        ratio = cpu[0] / gpu[0]
        below = math.hypot(math.log(cpu[0] / cpu[1]), math.log(gpu[2] / gpu[0]))
        above = math.hypot(math.log(cpu[2] / cpu[0]), math.log(gpu[0] / gpu[1]))
        return cls(ratio, ratio * math.exp(-below), ratio * math.exp(above))


def crossing_batches() -> tuple[int, ...]:
    return tuple(2**power for power in range(17))


def pays_from(ratios: Sequence[Speedup], is_sure: bool = True) -> tuple[str, int | None, int | None]:
    """Returns a clause, and the batches from which a GPU is probably and surely faster, None for no batch.

    Args:
        ratios: speed-up at each of `crossing_batches()`.
        is_sure: whether a GPU may be said to pay surely.
    """
    probably = _start([ratio.median > 1 for ratio in ratios])
    surely = _start([ratio.low > 1 for ratio in ratios])
    if not probably:
        return f"A GPU probably pays at no batch up to {crossing_batches()[-1]:,}", None, None
    if not is_sure:
        return f"A GPU probably pays from batch {probably:,} on", probably, None
    if not surely:
        return f"A GPU probably pays from batch {probably:,} on, surely at no batch", probably, None
    start = f"A GPU surely pays from batch {surely:,} on"
    return (start if surely == probably else f"{start}, probably from {probably:,} on"), probably, surely


def _start(holds: Sequence[bool]) -> int | None:
    """Returns the first batch of those at the end for all of which a condition holds."""
    first = max((number + 1 for number, one in enumerate(holds) if not one), default=0)
    return crossing_batches()[first] if first < len(holds) else None
