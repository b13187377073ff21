"""A time limit bounds the whole of a search, a race and the trying of remedies: what takes longer is ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import hotloop
from hotloop.core.processes import Deadline, time_limit
from hotloop.core.records.race import Parity
from hotloop.errors import TimeOverError
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask
from hotloop.tuning import race, tune
from hotloop.tuning import search as module
from hotloop.tuning.contenders import RaceSpec
from hotloop.tuning.economics import Budget
from hotloop.tuning.races import measure
from hotloop.tuning.races.measure import Contender
from hotloop.tuning.search import BASELINE
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tuning.fake_races import HALF, Races, searching

ENDLESS_S, BOUND_S = 300.0, 60.0
"""What is planted takes the first; a command that ends it takes far less than the second, on a busy machine too."""


def endless(*given: Any, **options: Any) -> Any:
    """Work that goes on for long, and catches what libraries catch."""
    until = time.monotonic() + ENDLESS_S
    while time.monotonic() < until:
        try:
            time.sleep(0.02)
        except Exception:  # as compilers do: an alarm must not be lost in it
            continue


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return act(), time.monotonic() - began


def lowering_endlessly(compiled: bool) -> Callable[..., Any]:
    """Lowers a plan as it is; compiled plans take for ever."""
    lowered = module.lower

    def lower(task: Any, plan: Plan) -> Any:
        return endless() if compiled and plan.compile != "none" else lowered(task, plan)

    return lower


def proving(taking: Callable[[str], bool]) -> Any:
    """Proofs, of which some take for ever."""

    def prove(programs: Sequence[Any]) -> list[Parity]:
        name = programs[0].parts.plan.brief()
        if taking(name):
            endless()
        return [Parity(plan=name, parity="bitwise", reason="it was said so", states=16)]

    return prove


@pytest.mark.more
def test_a_compilation_that_takes_too_long_is_ended_and_the_plan_without_it_is_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    races, said = Races(optimizer__fused=1.2, compile__package=2.0), list[str]()
    search = searching(
        monkeypatch,
        races,
        compiler=True,
        task=family("mlp"),
        time_limit_s=10.0,
        say=said.append,
    )
    monkeypatch.setattr(module, "lower", lowering_endlessly(compiled=True))
    monkeypatch.setattr("hotloop.tuning.search.profile_step", lambda program: HALF)
    monkeypatch.setattr("hotloop.tuning.search.estimate_compile_s", lambda *given: 0.1)
    monkeypatch.setattr("hotloop.tuning.economics.estimate_compile_s", lambda *given: 0.1)
    search.deadline = Deadline.from_limit(10.0)
    winner, took_s = timed(search.run)
    assert winner == "optimizer=fused", (search.notes, search.timings)
    assert search.timings[winner].parity == "bitwise"
    assert took_s < BOUND_S
    assert any(note.startswith("racing was ended: ") and "of the time limit" in note for note in search.notes)
    assert (
        "the search takes up to 10 s" in said[0]
        and "this run takes 1000 s" in said[0]
        and "would save 500 s" in said[0]
    )


@pytest.mark.more
def test_a_proof_that_takes_too_long_is_ended_and_leaves_time_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(optimizer__fused=1.3, layout__channels_last=1.2)
    search = searching(
        monkeypatch,
        races,
        time_limit_s=10.0,
        prove=proving(lambda name: "fused" in name),
    )
    monkeypatch.setattr("hotloop.tuning.economics.PROOF_STEPS", 100)
    monkeypatch.setattr("hotloop.tuning.search.combine_changes", lambda *given: {})
    monkeypatch.setattr(search, "_race_best_again", lambda *given: search.base)
    search.deadline = Deadline.from_limit(10.0)
    winner, took_s = timed(search.run)
    assert winner == "layout=channels_last", (search.notes, search.timings)
    assert search.timings["optimizer=fused"].parity == "unproven" and search.timings["optimizer=fused"].short_of_memory
    assert "its proof was ended" in (search.timings["optimizer=fused"].parity_reason or "")
    assert took_s < BOUND_S


def test_what_no_stage_of_a_search_ends_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(monkeypatch, Races(), time_limit_s=0.1, deadline=Deadline.from_limit(0.1))
    monkeypatch.setattr(search, "_time_baseline", endless)
    winner, took_s = timed(search.run)
    assert winner == BASELINE and took_s < BOUND_S
    assert "the search was ended" in search.notes[-1]


def test_tune_ends_by_its_time_limit_and_does_not_remember_what_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tuning.search.PlanSearch._race_eager", endless)
    monkeypatch.setattr("hotloop.tuning.search.Runner.quick_estimate", lambda self, seconds: (1e-3, 0.0))
    verdict, took_s = timed(lambda: hotloop.tune(a_task(epochs=100), device="cpu", time_limit="8s", progress=False))
    assert verdict.winner == BASELINE and took_s < BOUND_S
    # On a busy machine so little is left when the search begins that no race is begun.
    assert any("racing was ended" in note or "of the time limit" in note for note in verdict.notes), verdict.notes


def test_the_first_line_of_tune_says_what_the_search_may_cost_and_save() -> None:
    said: list[str] = []
    loaded = LoadedTask(a_task(epochs=100), None, {})
    tune.tune_loaded(loaded, Plan(device="cpu"), time_limit="0.5s", say=said.append)
    assert said[0].startswith("the search takes up to 0 s; this run takes") and "a plan 2 times as fast" in said[0]
    without = Budget.of(0.01, 100_000, None).forecast()
    assert (
        "racing and a proof take up to about" in without
        and "this run takes 1000 s" in without
        and "would save 500 s" in without
    )
    assert "the length of the run is unknown" in Budget.of(0.01, None, None).forecast()


@pytest.mark.more
@pytest.mark.parametrize("slow", ["preparing", "racing", "proving"])
def test_a_race_ends_by_its_time_limit(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rival = Plan(device="cpu", optimizer="foreach")
    prepared, rounds = measure._prepare, measure.run_rounds

    def prepare(racer: Any, *given: Any) -> Any:
        return endless() if slow == "preparing" and racer.name != "baseline" else prepared(racer, *given)

    def run(*given: Any) -> Any:
        rounds(*given)
        return endless() if slow == "racing" else None

    monkeypatch.setattr(measure, "_prepare", prepare)
    monkeypatch.setattr(measure, "run_rounds", run)
    asked = RaceSpec(("baseline", rival), devices=["cpu"], time_limit="3s")
    prove = endless if slow == "proving" else None
    verdict, took_s = timed(lambda: race.race_loaded(LoadedTask(a_task(epochs=100), None, {}), asked, prove=prove))
    assert took_s < BOUND_S
    timing = verdict.plan("optimizer=foreach device=cpu" if len(verdict.plans) < 2 else verdict.plans[1].name)
    if slow == "preparing":
        assert "preparing" in (timing.failure or "") and "of the time limit" in (timing.failure or "")
        assert timing.short_of_memory  # another time there may be more time
    elif slow == "racing":
        assert timing.failure is None and timing.ratio is not None
    else:
        assert timing.parity == "unproven" and "the proof was ended" in (timing.parity_reason or "")


@pytest.mark.more
def test_a_plan_that_is_not_ready_in_time_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, task = measure._prepare, a_task(epochs=100)
    monkeypatch.setattr(
        measure, "_prepare", lambda racer, *given: endless() if racer.name == "slow" else prepared(racer, *given)
    )
    plan = Plan(device="cpu")
    entrants = [Contender(name, lambda: lower(task, plan), plan) for name in ("baseline", "slow", "other")]
    given = dict(steps=1000, time_limit_s=0.5, brief=True, deadline=Deadline.from_limit(8.0))
    found, took_s = timed(lambda: measure.measure(entrants, "baseline", **given))  # type: ignore[arg-type]
    assert took_s < BOUND_S
    assert "preparing slow was ended" in (found.plans[1].failure or "") and found.plans[1].short_of_memory
    assert found.plans[2].ratio is not None


@pytest.mark.more
def test_a_race_whose_baseline_is_not_ready_in_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_warm_up_process", endless)
    asked = RaceSpec(("baseline", "auto"), devices=["cpu"], time_limit="0.1s")
    with pytest.raises(TimeOverError, match=r"preparing baseline was ended.*Give it more time"):
        race.race_loaded(LoadedTask(a_task(epochs=100), None, {}), asked, prove=None)


def test_the_sizes_of_a_race_share_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[float] = []

    def raced(loaded: Any, contest: Any, *, deadline: Deadline, **given: Any) -> Any:
        parts.append(deadline.left_s)
        raise TimeOverError("no time")

    monkeypatch.setattr(race, "race_loaded", raced)
    monkeypatch.setattr(race, "load_task", lambda *given: None)
    with pytest.raises(TimeOverError):
        race.race_scales("t.py", {}, ("width", ["1", "2", "3", "4"]), RaceSpec(("baseline", "auto"), time_limit="40s"))
    assert 9 < parts[0] <= 10


@pytest.mark.more
def test_a_later_alarm_inside_of_an_earlier_one_does_not_delay_it() -> None:
    def work() -> None:
        with pytest.raises(TimeOverError), Deadline.from_limit(0.05).enforce("it"), time_limit(ENDLESS_S, ValueError):
            endless()

    assert timed(work)[1] < BOUND_S


def test_an_earlier_alarm_inside_of_a_later_one_ends_its_work_alone() -> None:
    with time_limit(ENDLESS_S, ValueError):
        with pytest.raises(TimeOverError), Deadline.from_limit(0.05).enforce("it"):
            endless()
        assert timed(lambda: time.sleep(0.01))[1] < BOUND_S
