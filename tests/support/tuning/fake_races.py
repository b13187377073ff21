"""Races and proofs of a search, made up: what tests of searches and of choosing share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hotloop.core.hardware.devices import resolve_device
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.race import Parity, Timing
from hotloop.core.records.training import TaskFacts
from hotloop.plan import Plan
from hotloop.tuning import search as module
from hotloop.tuning.auto import feasibility_facts
from hotloop.tuning.races.measure import Contender, RaceMeasurement
from hotloop.tuning.races.rounds import ContenderTimes, RaceLimits, ratio_to_baseline, run_rounds
from hotloop.tuning.races.statistics import verdict_of
from hotloop.tuning.search import PlanSearch
from hotloop.tuning.step_profile import StepProfile
from tests.support.tasks.model_families import family
from tests.tuning.races.test_rounds import Machine
from tests.tuning.races.test_rounds import Plan as Windows

STEP_MS = 10.0
HALF = StepProfile(100, step_s=STEP_MS / 1e3, library_s=0.35 * STEP_MS / 1e3, other_s=0.38 * STEP_MS / 1e3)
"""A step that could be twice as fast."""


def told(task: Any) -> tuple[TaskFacts, Hardware]:
    return feasibility_facts(task, Plan())


class Races:
    """In place of races: each plan is so many times as fast as the baseline as `speeds` say, by axis=value."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = {name.replace("__", "="): value for name, value in speeds.items()}
        self.raced: list[str] = []
        self.seconds = 0.0

    def __call__(
        self, entrants: Sequence[Contender], baseline: str, *, steps: int, time_limit_s: float, **_: Any
    ) -> RaceMeasurement:
        self.seconds += time_limit_s
        return RaceMeasurement([self.timing(entrant, steps) for entrant in entrants], [])

    def timing(self, entrant: Contender, steps: int) -> Timing:
        ratio = 1.0
        for part in entrant.name.split():
            ratio *= self.speeds.get(part, 1.0)
        self.raced.append(entrant.name)
        entrant.lower()
        assert entrant.plan is not None
        return Timing(
            name=entrant.name,
            plan=entrant.plan.model_dump(),
            step_ms=STEP_MS / ratio,
            ratio=ratio,
            ratio_low=0.99 * ratio,
            ratio_high=1.01 * ratio,
            verdict="faster" if ratio > 1.03 else "slower" if ratio < 0.97 else "no difference",
            startup_s=0.0,
            compile_s=0.0,
            run_s=steps * STEP_MS / ratio / 1e3,
        )


class Rounds(Races):
    """Real rounds of windows, on a machine made of a clock alone."""

    def __call__(self, entrants: Sequence[Contender], baseline: str, *, steps: int, **_: Any) -> RaceMeasurement:
        made, clock = {entrant.name: self.timing(entrant, steps) for entrant in entrants}, Machine()
        lanes = {
            one.name: ContenderTimes(
                one.name, Windows(clock, one.name, (made[one.name].step_ms or 0.0) / 1e3), group=one.group
            )
            for one in entrants
        }
        run_rounds(list(lanes.values()), lanes[baseline], RaceLimits(1000.0, lambda: clock.now, brief=True))
        return RaceMeasurement([self.seen(made[name], lane, lanes[baseline]) for name, lane in lanes.items()], [])

    def seen(self, timing: Timing, lane: ContenderTimes, baseline: ContenderTimes) -> Timing:
        found = ratio_to_baseline(lane, baseline)
        figures = dict(ratio=found.median, ratio_low=found.low, ratio_high=found.high, windows=found.pairs)
        return timing.model_copy(update=figures | {"verdict": verdict_of(found), "left_out": not lane.is_running})


def proving(parity: str = "bitwise") -> Any:
    def prove(programs: Sequence[Any]) -> list[Parity]:
        return [Parity(plan=one.parts.plan.brief(), parity=parity, reason="said so", states=16) for one in programs]

    return prove


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled plans are lowered as they are without."""
    lowered = module.lower
    monkeypatch.setattr(
        module, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )


def searching(monkeypatch: pytest.MonkeyPatch, races: Races, steps: int = 100_000, **given: Any) -> PlanSearch:
    """A search whose races, times and compilations are made up; the rest is real."""
    task = given.pop("task", None) or family("cnn")
    base = resolve_device(Plan(), "cpu")
    facts, hardware = told(task)
    if given.pop("compiler", False):
        uncompiled(monkeypatch)
    else:
        hardware = replace(hardware, compiler=None)
    hardware = replace(hardware, processor=replace(hardware.processor, threads=given.pop("threads", 1)))
    monkeypatch.setattr(module, "measure", races)
    monkeypatch.setattr(module.Runner, "quick_estimate", lambda self, seconds: (STEP_MS / 1e3, 0.0))
    facts = facts.model_copy(update={"steps": steps})
    fields = dict(
        task=task, baseline=base, base=base, fixed={"device"}, facts=facts, hardware=hardware, prove=proving()
    )
    return PlanSearch(**{**fields, **given})


class Doubtful(Races):
    """A first race leaves everything undecided."""

    def timing(self, entrant: Contender, steps: int) -> Timing:
        timing = super().timing(entrant, steps)
        first = self.raced.count(entrant.name) == 1
        return timing.model_copy(update={"verdict": None} if first else {})
