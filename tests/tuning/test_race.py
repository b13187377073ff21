"""Who wins a race, by which proof, and what can be asked of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hotloop
from bench.race_verdicts import MARKED
from hotloop.core.processes import Terminated
from hotloop.core.records.race import Parity, Verdict
from hotloop.errors import PlanError, TaskError
from hotloop.plan import Plan
from hotloop.report.race import winner_sentence
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.tuning import race
from hotloop.tuning.contenders import RaceSpec
from hotloop.tuning.races.measure import measure
from tests.support.programs import a_task
from tests.support.tasks.timed_tasks import CPU, Clock, standing_still


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return standing_still(monkeypatch)


# --- parity, and the winner


def proof(plan: Plan, parity: Any) -> Parity:
    return Parity(plan=plan.brief(), parity=parity, reason="planted", states=16)


FAST, OTHER = Plan(device="cpu"), Plan(device="cpu", optimizer="foreach")
PROVEN: dict[str, tuple[Any, str]] = {
    "bitwise": ("bitwise", "baseline"),
    "fp32-equivalent": ("fp32-equivalent", "baseline"),
    "reduced-precision": ("reduced-precision", MARKED.brief()),
    "unproven": ("unproven", MARKED.brief()),
    "broken": ("broken", MARKED.brief()),
}


Prove = Callable[[Task, Plan], Parity]


def each(prove: Prove) -> Any:
    """A proof of several plans at once, one by one."""
    return lambda task, plans, progress: [prove(task, plan) for plan in plans]


def contest(clock: Clock, monkeypatch, prove: Prove | None, *plans: Any) -> Verdict:
    monkeypatch.setattr("hotloop.tuning.race.measure", lambda *a, **k: measure(*a, **k, clock=clock))
    return hotloop.race(
        a_task(epochs=200), plans, baseline=MARKED, prove=prove and each(prove), progress=False, time_limit="10s"
    )


@pytest.mark.parametrize("name", PROVEN)
def test_only_a_trusted_plan_wins(name: str, clock: Clock, monkeypatch) -> None:
    parity, winner = PROVEN[name]
    asked: list[Plan] = []

    def prove(task: Task, plan: Plan) -> Parity:
        asked.append(plan)
        return proof(plan, parity if plan == CPU else "bitwise")

    verdict = contest(clock, monkeypatch, prove, CPU, CPU)
    assert verdict.plan("baseline").verdict == "faster"
    assert verdict.winner == winner
    assert verdict.plan("baseline").parity == verdict.plan("baseline (2)").parity == parity
    assert verdict.plan("baseline").parity_reason == "planted"
    assert len(asked) == len(set(asked))  # the same plan is proven once


def test_without_a_proof_asked_for_the_fastest_wins(clock: Clock, monkeypatch) -> None:
    verdict = contest(clock, monkeypatch, None, CPU)
    assert verdict.winner == "baseline" and verdict.plan("baseline").parity is None


def test_a_proof_that_cannot_be_had_is_no_proof(clock: Clock, monkeypatch) -> None:
    def prove(task: Task, plan: Plan) -> Parity:
        raise TaskError("the Task is too random to compare")

    verdict = contest(clock, monkeypatch, prove, CPU)
    timing = verdict.plan("baseline")
    assert (timing.parity, verdict.winner) == ("unproven", MARKED.brief())
    assert timing.parity_reason == "the Task is too random to compare"


@pytest.mark.parametrize(("signal", "by"), [(KeyboardInterrupt, "SIGINT"), (Terminated, "SIGTERM")])
def test_a_proof_that_is_stopped_leaves_what_was_raced_and_no_winner(signal: Any, by: str, clock, monkeypatch) -> None:
    def prove(task: Task, plan: Plan) -> Parity:
        raise signal

    with pytest.raises(signal, match=f"stopped by {by} at the proof"):
        contest(clock, monkeypatch, prove, CPU)
    asked = RaceSpec((CPU,), MARKED, time_limit="10s")
    verdict = race.race_loaded(LoadedTask(a_task(epochs=200), None, {}), asked, prove=each(prove))
    assert (verdict.winner, verdict.ended_by, verdict.ended) == (None, by, f"stopped by {by} at the proof")
    assert verdict.plan("baseline").verdict == "faster" and verdict.plan("baseline").parity is None
    assert "isn't proven" in winner_sentence(verdict)


def test_the_baseline_needs_no_proof(clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr("hotloop.tuning.race.measure", lambda *a, **k: measure(*a, **k, clock=clock))
    asked: list[Plan] = []

    def prove(task: Task, plan: Plan) -> Parity:
        asked.append(plan)
        return proof(plan, "bitwise")

    verdict = hotloop.race(a_task(), [MARKED], devices=["cpu"], prove=each(prove), progress=False)
    assert asked == [MARKED] and verdict.plan("baseline").parity == "bitwise" and verdict.winner == "baseline"


# --- what is asked

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one plan alone": (dict(plans=["baseline"]), "one plan alone to race: baseline"),
    "none": (dict(plans=[]), "one plan alone to race: baseline"),
    "a file that isn't there": (dict(plans=["mine.toml"]), "no plan at 'mine.toml'"),
    "a device": (dict(plans=["auto"], devices=["cpu", "cuda:7"]), "'cuda:7' isn't on this machine"),
    "a time": (dict(time_limit="soon"), "time-limit='soon'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_raced(name: str) -> None:
    given, says = WRONG[name]
    with pytest.raises(PlanError, match=says):
        hotloop.race(a_task(), progress=False, prove=None, **given)


def test_names_of_entries() -> None:
    from hotloop.tuning.contenders import RaceSpec

    entries, baseline = RaceSpec(
        ["auto", "auto", OTHER], devices=["cpu", "cuda"], axes={"threads": 1}
    ).requested_plans()
    assert baseline == "baseline on cpu"
    assert list(entries)[:4] == ["baseline on cpu", "auto on cpu", "auto threads=1 on cpu", "optimizer=foreach on cpu"]
    assert {name: wanted.plan.threads for name, wanted in entries.items() if "baseline" in name} == {
        "baseline on cpu": None,
        "baseline on cuda": None,
    }
    assert entries["optimizer=foreach on cuda"].plan == OTHER.with_axes(device="cuda", threads=1)
