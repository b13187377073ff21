"""Windows of several plans in turn, until enough was measured.

A round runs each plan twice, forth and back (A B C C B A), and the next one the other way round, so that a machine that
grows slower while it is measured on slows all plans alike. Each round gives one pair of times for each plan and the
baseline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hotloop.measuring.clocks import Clock
from hotloop.measuring.statistics import (
    ENOUGH_PAIRS,
    LEAST_PAIRS,
    Ratio,
    behind,
    fastest_known,
    hopeless,
    ratio_of,
    settled,
)

_WINDOW_S = {"cpu": 0.01}
"""On a CPU short, so that what interrupts it spoils some windows and leaves the others, which the median is of."""

_WINDOW_ELSEWHERE_S = 0.1
"""On an accelerator long, so that waiting for it at both ends costs next to nothing."""

_SETTLING = 0.2
"""Share of a window's steps that is run before it, untimed; a step at least."""

_LONG_S = 0.05
"""Steps that last longer don't feel what the plan before left in the caches."""

_ALIKE = 4.0
"""Plans up to so many times as fast or slow as the baseline run the same steps, and so the same batches, as it."""


class Windows(Protocol):
    def settle(self, steps: int) -> None:
        """Runs steps that don't count."""

    def window(self, steps: int) -> float:
        """Seconds that so many steps take."""


@dataclass
class Lane:
    """One plan in the race.

    Attributes:
        name: for the progress bar.
        windows: what runs it.
        steps, untimed: of a window, and before it.
        times: seconds of a step, round by round.
        running: whether it goes on: False once it failed, or can't win any more.
        error: what ended it.
    """

    name: str
    windows: Windows
    steps: int = 1
    untimed: int = 0
    times: list[float] = field(default_factory=list)
    running: bool = True
    error: Exception | None = None

    def lay_out(self, device: str, step_s: float, baseline_s: float) -> None:
        """Chooses the length of windows from what a step takes there, and what it takes the baseline."""
        alike = baseline_s / _ALIKE < step_s < baseline_s * _ALIKE
        steps = _WINDOW_S.get(device, _WINDOW_ELSEWHERE_S) / max(baseline_s if alike else step_s, 1e-7)
        self.steps, self.untimed = max(1, round(steps)), round(_SETTLING * steps)
        if step_s < _LONG_S:
            self.untimed = max(self.untimed, 1)


@dataclass(frozen=True)
class Limits:
    """When to stop: after so many seconds by this clock, if not before.

    Attributes:
        brief: whether it is enough to know which is the fastest; by how much then stays rough.
    """

    seconds: float
    clock: Clock = time.perf_counter
    brief: bool = False


def run_rounds(
    lanes: Sequence[Lane],
    baseline: Lane,
    limits: Limits,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Runs rounds until each lane's interval is narrow enough, it lost, or the time is over; one round at least.

    Args:
        progress: is told which share of the time limit is over.

    Raises:
        Exception: the baseline's own.
    """
    began = limits.clock()
    number, last = 0, 0.0
    while True:
        started = limits.clock()
        if number and started - began + last > limits.seconds:
            return
        running = [lane for lane in lanes if lane.running]
        if _enough(running, baseline, number, limits.brief):
            return
        _round(running[:: -1 if number % 2 else 1], baseline)
        _drop_losers(running, baseline, limits.brief)
        number, last = number + 1, limits.clock() - started
        progress(min(1.0, (limits.clock() - began) / limits.seconds))


def ratio(lane: Lane, baseline: Lane) -> Ratio:
    return ratio_of(baseline.times, lane.times)


def _round(lanes: Sequence[Lane], baseline: Lane) -> None:
    taken: dict[int, float] = {}
    for lane in [*lanes, *lanes[::-1]]:
        if not lane.running:
            continue
        try:
            lane.windows.settle(lane.untimed)
            taken[id(lane)] = taken.get(id(lane), 0.0) + lane.windows.window(lane.steps)
        except Exception as error:
            if lane is baseline:
                raise
            lane.running, lane.error = False, error
    for lane in lanes:
        if lane.running:
            lane.times.append(taken[id(lane)] / (2 * lane.steps))


def _drop_losers(lanes: Sequence[Lane], baseline: Lane, brief: bool) -> None:
    found = {id(lane): ratio(lane, baseline) for lane in lanes if lane.running}
    best = max(found.values(), key=lambda one: one.median if brief else one.low or 0.0)
    for lane in lanes:
        if lane.running and lane is not baseline:
            lane.running = not (hopeless if brief else behind)(found[id(lane)], best)


def _enough(lanes: Sequence[Lane], baseline: Lane, rounds: int, brief: bool) -> bool:
    if rounds < (LEAST_PAIRS if brief else ENOUGH_PAIRS):
        return False
    others = [ratio(lane, baseline) for lane in lanes if lane is not baseline]
    return fastest_known(others) if brief else all(settled(one) for one in others)
