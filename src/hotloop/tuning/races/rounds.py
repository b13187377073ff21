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

from hotloop.tuning.races.runner import Clock
from hotloop.tuning.races.statistics import (
    ENOUGH_PAIRS,
    MIN_PAIRS,
    Ratio,
    can_be_dropped,
    could_win,
    decided_groups,
    is_clearly_slower,
    is_precise,
    ratio_of,
)

_WINDOW_S = {"cpu": 0.01}
"""Seconds of a window: short on a CPU, so that an interruption affects few windows, and not the median."""

_ACCELERATOR_WINDOW_S = 0.1
"""Seconds on an accelerator: long, so that synchronization at both ends costs little."""

_UNTIMED_SHARE = 0.2
"""Untimed steps before a window, as a share of its steps; at least one."""

_LONG_STEP_S = 0.05
"""Seconds of a step from which the cache content of the plan before has no effect."""

_SAME_STEPS_RATIO = 4.0
"""Factor to the baseline's speed below which a plan runs the same steps and batches as the baseline."""


class TimedWindows(Protocol):
    def run_untimed(self, steps: int) -> None:
        """Runs steps without timing."""

    def window(self, steps: int) -> float:
        """Returns the seconds of `steps` steps."""


@dataclass(frozen=True)
class WindowSteps:
    """The windows of a plan.

    Attributes:
        steps, untimed: steps of a window, and before it.
        passes: windows in a round: two, forward and backward; one for long steps in a search.
    """

    steps: int
    untimed: int
    passes: int

    @classmethod
    def of(cls, device: str, step_s: float, baseline_s: float, brief: bool = False) -> WindowSteps:
        window_s = _WINDOW_S.get(device, _ACCELERATOR_WINDOW_S)
        alike = baseline_s / _SAME_STEPS_RATIO < step_s < baseline_s * _SAME_STEPS_RATIO
        steps = window_s / max(baseline_s if alike else step_s, 1e-7)
        untimed = max(round(_UNTIMED_SHARE * steps), 1 if step_s < _LONG_STEP_S else 0)
        return cls(max(1, round(steps)), untimed, 1 if brief and baseline_s >= window_s else 2)

    def round_s(self, step_s: float) -> float:
        return self.passes * (self.untimed + self.steps) * step_s


@dataclass
class ContenderTimes:
    """The times of one plan in a race.

    Attributes:
        steps, untimed, passes: see `WindowSteps`.
        group: plans of one group exclude each other; plans of different groups may be combined.
        times: seconds of a step, round by round.
        is_running: False after a failure, or when the plan can't win.
        feed_s: seconds in which workers load a batch, measured alone; else empty. A step counts as at least that long,
            since workers load ahead between windows.
    """

    name: str
    windows: TimedWindows
    steps: int = 1
    untimed: int = 0
    passes: int = 2
    group: str = ""
    times: list[float] = field(default_factory=list)
    is_running: bool = True
    error: Exception | None = None
    feed_s: Sequence[float] = ()

    def note(self, step_s: float) -> None:
        fed_s = self.feed_s[len(self.times) % len(self.feed_s)] if self.feed_s else 0.0
        self.times.append(max(step_s, fed_s))

    def set_layout(self, device: str, step_s: float, baseline_s: float, brief: bool = False) -> None:
        """Chooses the windows, see `WindowSteps.of`."""
        layout = WindowSteps.of(device, step_s, baseline_s, brief)
        self.steps, self.untimed, self.passes = layout.steps, layout.untimed, layout.passes


@dataclass(frozen=True)
class RaceLimits:
    """Seconds of a race by `clock`; `brief` stops when the fastest of each group is known, whatever its ratio."""

    seconds: float
    clock: Clock = time.perf_counter
    brief: bool = False


def run_rounds(
    lanes: Sequence[ContenderTimes],
    baseline: ContenderTimes,
    limits: RaceLimits,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Runs at least one round, until each plan's interval is narrow, the plan has lost, or the time is over.

    Args:
        progress: called with the elapsed share of the time limit.

    Raises:
        Exception: an error of the baseline.
    """
    began = limits.clock()
    number, last = 0, 0.0
    while True:
        started = limits.clock()
        if number and started - began + last > limits.seconds:
            return
        running = _next_contenders([lane for lane in lanes if lane.is_running], baseline, number, limits.brief)
        if not running:
            return
        _run_round(running[:: -1 if number % 2 else 1], baseline)
        _drop_losers(running, baseline, limits.brief)
        number, last = number + 1, limits.clock() - started
        progress(min(1.0, (limits.clock() - began) / limits.seconds))


def ratio_to_baseline(lane: ContenderTimes, baseline: ContenderTimes) -> Ratio:
    return ratio_of(baseline.times, lane.times)


def _run_round(lanes: Sequence[ContenderTimes], baseline: ContenderTimes) -> None:
    taken: dict[int, float] = {}
    for lane in [*lanes, *(lane for lane in lanes[::-1] if lane.passes > 1)]:
        if not lane.is_running:
            continue
        try:
            lane.windows.run_untimed(lane.untimed)
            taken[id(lane)] = taken.get(id(lane), 0.0) + lane.windows.window(lane.steps)
        except Exception as error:
            if lane is baseline:
                raise
            lane.is_running, lane.error = False, error
    for lane in lanes:
        if lane.is_running:
            lane.note(taken[id(lane)] / (lane.passes * lane.steps))


def _drop_losers(lanes: Sequence[ContenderTimes], baseline: ContenderTimes, brief: bool) -> None:
    found = {id(lane): ratio_to_baseline(lane, baseline) for lane in lanes if lane.is_running}
    running = [lane for lane in lanes if lane.is_running]
    for lane in running:
        if lane is baseline:
            continue
        rivals = [one for one in running if not brief or one is baseline or one.group == lane.group]
        if brief:
            best = max((found[id(one)] for one in rivals), key=lambda one: one.median)
            lane.is_running = not can_be_dropped(found[id(lane)], best)
        else:
            best = max((found[id(one)] for one in rivals), key=lambda one: one.low or 0.0)
            lane.is_running = could_win(found[id(lane)]) or not is_clearly_slower(found[id(lane)], best)


def _next_contenders(
    lanes: Sequence[ContenderTimes], baseline: ContenderTimes, rounds: int, brief: bool
) -> list[ContenderTimes]:
    """Returns the plans of the next round with the baseline; empty when enough is known."""
    if rounds < (MIN_PAIRS if brief else ENOUGH_PAIRS):
        return list(lanes)
    groups: dict[str, list[Ratio]] = {}
    for lane in lanes:
        if lane is not baseline:
            groups.setdefault(lane.group, []).append(ratio_to_baseline(lane, baseline))
    if not brief:
        return [] if all(is_precise(one) for found in groups.values() for one in found) else list(lanes)
    known = decided_groups(groups)
    contested = [lane for lane in lanes if lane is baseline or lane.group not in known]
    return contested if len(contested) > 1 else []
