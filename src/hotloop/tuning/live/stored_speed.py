"""Stores what a live search found, for later runs: they begin with the proven plan."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.records.race import Parity, Timing, Verdict
from hotloop.core.records.training import TaskFacts
from hotloop.tuning.live.window_race import WindowRace
from hotloop.tuning.races.statistics import ratio_of, verdict_of
from hotloop.tuning.search.race_cache import save_races


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
    """Stores the speed of `race.plan` over `race.rival`, the baseline; returns a note on failure or a busy machine."""
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
