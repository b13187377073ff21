"""What a live search found is what a later run of the same Task begins with."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import STATES, Parity
from hotloop.core.records.training import SourceRecord
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask
from hotloop.tuning import race_cache
from hotloop.tuning.auto import cached_best_race, facts_with_fingerprint
from hotloop.tuning.window_race import ProvenPlan, WindowRace, store_speed
from tests.support.programs import a_task

RECORD = SourceRecord(file="t.py", module="t", attribute="task", digest="d", reference="t.py", origin=".")
BASELINE, PLAN = Plan(device="cpu"), Plan(device="cpu", optimizer="foreach")


def raced(own_s: float, baseline_s: float) -> WindowRace:
    """A race in which the plan in use and the baseline take so many seconds for a step."""
    race = WindowRace(PLAN, BASELINE, least_pairs=8)
    while not race.is_over:
        steps = race.most_steps(200)
        race.record(steps, steps * (baseline_s if race.next_plan == BASELINE else own_s))
    return race


@pytest.mark.parametrize(
    ("own_s", "parity", "expected"),
    [(1e-3, "fp32-equivalent", PLAN), (3e-3, "fp32-equivalent", None), (1e-3, "reduced-precision", None)],
    ids=["faster and proven", "slower", "of fewer bits"],
)
def test_a_later_run_begins_with_a_plan_that_is_faster_and_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_s: float, parity: str, expected: Plan | None
) -> None:
    monkeypatch.setattr(race_cache, "races_folder", lambda: tmp_path / "races")
    loaded = LoadedTask(a_task(optimizer=torch.optim.Adam, epochs=1000), RECORD, {})
    facts = facts_with_fingerprint(loaded)
    race = raced(own_s, 2e-3)
    assert race.ratio is not None and race.ratio.pairs >= 8
    proof = Parity(plan=PLAN.brief(), parity=parity, reason="for the test", states=STATES)
    assert store_speed(loaded.task.name, facts, race, ProvenPlan(proof, 10.0, 0.1, time.monotonic())) == []
    found = cached_best_race(loaded, PlanRequest.from_value("auto", {"device": "cpu"}), print)
    assert (None if found is None else found.timing.as_plan) == expected
