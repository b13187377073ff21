"""Two proven plans take turns in a training's own steps, until it is known which is faster; the result is stored."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field

from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.hardware.machine_load import LoadMeter
from hotloop.core.records.race import Parity, Timing, Verdict
from hotloop.core.records.training import TaskFacts
from hotloop.plan import Plan
from hotloop.tuning.race_cache import save_races
from hotloop.tuning.races.statistics import MIN_PAIRS, Ratio, ratio_of, verdict_of

WINDOW_S, _MIN_STEPS = 0.15, 2
"""Least seconds and steps of a window that count."""

WARM_UP_STEPS = 2
"""First steps of a window, which don't count: caches are filled with the other plan's numbers."""

_MAX_PAIRS = 20

_FAR, FAR_PAIRS = 1.25, 3
"""A ratio beyond which few pairs suffice, if all of them show it; a wrong decision is corrected by the next race."""


@dataclass
class WindowRace:
    """Pairs of windows in the order A B, B A, A B: a change of the machine's load reaches both plans alike.

    Attributes:
        plan: in use before the race.
        rival: the other plan.
        least_pairs: pairs before the race ends, even if they are far apart.
        load: of other programs since the race began.
    """

    plan: Plan
    rival: Plan
    least_pairs: int = FAR_PAIRS
    load: LoadMeter = field(default_factory=LoadMeter)
    _step_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    _windows: int = 0
    _seconds: float = 0.0
    _steps: int = 0
    _warm_up_steps: int = 0

    @property
    def has_rivals_turn(self) -> bool:
        return self._windows % 4 in (1, 2)

    @property
    def next_plan(self) -> Plan:
        return self.rival if self.has_rivals_turn else self.plan

    def most_steps(self, steps: int) -> int:
        """Returns the steps of the next span, at most `steps`."""
        warming = WARM_UP_STEPS - self._warm_up_steps
        return min(steps, warming) if warming > 0 else steps

    def record(self, steps: int, seconds: float) -> None:
        """Records a span of the plan whose turn it is."""
        if self._warm_up_steps < WARM_UP_STEPS:
            self._warm_up_steps += steps
            return
        self._steps += steps
        self._seconds += seconds
        if self._seconds >= WINDOW_S and self._steps >= _MIN_STEPS:
            self._step_s[self.has_rivals_turn].append(self._seconds / self._steps)
            turn, self._windows = self.has_rivals_turn, self._windows + 1
            self._seconds, self._steps = 0.0, 0
            if self.has_rivals_turn != turn:
                self._warm_up_steps = 0

    @property
    def ratio(self) -> Ratio | None:
        """How many times as fast the rival is; None before the first pair."""
        pairs = min(map(len, self._step_s.values()))
        return ratio_of(self._step_s[False], self._step_s[True], confidence=0.95) if pairs else None

    @property
    def is_over(self) -> bool:
        ratio = self.ratio
        if ratio is None or self._windows % 2:
            return False
        if ratio.pairs >= _MAX_PAIRS:
            return True
        pairs = zip(self._step_s[False], self._step_s[True], strict=False)
        ratios = [own / rival for own, rival in pairs]
        if ratio.pairs >= self.least_pairs and (min(ratios) > _FAR or max(ratios) < 1 / _FAR):
            return True
        return ratio.pairs >= MIN_PAIRS and verdict_of(ratio) != "no difference"

    @property
    def winner(self) -> Plan:
        """The rival if it is surely faster; else the plan that was in use."""
        ratio = self.ratio
        if ratio is None:
            return self.plan
        has_won = ratio.median > _FAR if ratio.low is None else verdict_of(ratio) == "faster"
        return self.rival if has_won else self.plan

    def step_s(self, plan: Plan) -> float:
        """Returns the median seconds of a step of either plan."""
        return statistics.median(self.times(plan))

    def times(self, plan: Plan) -> list[float]:
        """Returns the seconds of a step of either plan in each pair."""
        return self._step_s[plan == self.rival]

    def describe(self) -> str:
        """Returns how fast the rival is, in no sure words if the machine was busy."""
        ratio = self.ratio or Ratio(math.nan, None, None, 0)
        interval = "" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}, "
        unsure = "; not sure: the machine was busy" if self.load.busy() else ""
        speed = f"{ratio.median:.2f} times as fast as {self.plan.brief()}"
        return f"{self.rival.brief()} is {speed} ({interval}{ratio.pairs} pairs{unsure})"


@dataclass(frozen=True)
class ProvenPlan:
    """A plan in use that a child has compiled and proven.

    Attributes:
        compile_s: seconds of its compilation in the child.
        load_s: seconds of loading its package in this process, at `loaded_at` of `time.monotonic()`.
    """

    parity: Parity
    compile_s: float
    load_s: float
    loaded_at: float


def store_speed(task: str, facts: TaskFacts, race: WindowRace, proven: ProvenPlan) -> list[str]:
    """Stores the speed of `race.plan` over `race.rival`, the baseline, for later runs; returns a note on failure or a busy machine."""
    if busy := race.load.busy():
        return [f"auto: {busy}"]
    base_s, own_s = race.times(race.rival), race.times(race.plan)
    ratio = ratio_of(base_s, own_s)
    base = Timing(name="baseline", plan=race.rival.model_dump(), step_ms=1e3 * race.step_s(race.rival), compile_s=0.0)
    timing = Timing(
        name=race.plan.brief(),
        plan=race.plan.model_dump(),
        step_ms=1e3 * race.step_s(race.rival) / ratio.median,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        windows=ratio.pairs,
        compile_s=proven.compile_s,
        compile_warm_s=proven.load_s,
        startup_s=0.0,
        verdict=verdict_of(ratio),
    ).proven(proven.parity)
    verdict = Verdict(
        task=task,
        fingerprint=facts.fingerprint,
        plans=[base, timing],
        baseline=base.name,
        winner=timing.name,
        steps=facts.steps,
        machine=machine_name(),
        versions=speed_versions(),
        seconds=time.monotonic() - proven.loaded_at + proven.load_s,
    )
    return save_races(verdict)
