"""The search for a plan where it must be careful: long steps, little memory, streams, failing steps, nothing to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.core.processes import Deadline
from hotloop.core.records.race import Timing
from hotloop.errors import TaskError
from hotloop.lowering.eager_step import EagerStep
from hotloop.parity import proof
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask
from hotloop.tuning import search as module
from hotloop.tuning import tune
from hotloop.tuning.auto import feasibility_facts
from hotloop.tuning.economics import Budget, is_run_too_short
from hotloop.tuning.search import BASELINE
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tuning.fake_races import HALF, STEP_MS, Races, proving, searching

LONG_S = 1.5


class Long(Races):
    """Races that take down how much time each has, and how many plans."""

    def __init__(self, **speeds: float) -> None:
        super().__init__(**speeds)
        self.each: list[tuple[int, float]] = []
        self.longer = 1.0

    def __call__(self, entrants: Any, baseline: str, **given: Any) -> Any:
        self.each.append((len(entrants), given["time_limit_s"]))
        return super().__call__(entrants, baseline, **given)

    def timing(self, entrant: Any, steps: int) -> Timing:
        found = super().timing(entrant, steps)
        times = {"step_ms": self.longer * (found.step_ms or 0.0), "run_s": self.longer * (found.run_s or 0.0)}
        return found.model_copy(update=times)


class Blind(Long):
    """Races that can tell nothing."""

    def timing(self, entrant: Any, steps: int) -> Timing:
        return super().timing(entrant, steps).model_copy(update={"verdict": None})


def with_long_steps(patch: pytest.MonkeyPatch, races: Long, **given: Any) -> module.PlanSearch:
    races.longer = LONG_S * 1e3 / STEP_MS
    found = searching(patch, races, **given)
    patch.setattr(module.Runner, "quick_estimate", lambda self, seconds: (LONG_S, 0.0))
    return found


# ---------------------------------------------------------------- long steps


def test_a_race_of_long_steps_has_time_for_eight_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-18 on a CPU: 1.5 s for a step of 128, 30 epochs."""
    races = Long(optimizer__fused=1.2)
    assert with_long_steps(monkeypatch, races, steps=30 * 391).run() == "optimizer=fused"
    plans, seconds = races.each[0]
    assert seconds >= 8 * plans * LONG_S


def test_a_short_run_of_long_steps_races_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Long(optimizer__fused=1.9)
    search = with_long_steps(monkeypatch, races, steps=600)
    assert search.run() == "optimizer=fused"
    plans, _ = races.each[0]
    assert 8 * plans < 0.05 * 600  # what its windows take, if nothing is won
    assert any("there is time for" in note for note in search.notes)


def test_a_time_limit_is_kept_to_with_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Long(optimizer__fused=1.2, layout__channels_last=1.3)
    with_long_steps(monkeypatch, races, steps=1_000, time_limit_s=150.0).run()
    assert sum(seconds for _, seconds in races.each) <= 150
    assert all(seconds >= 8 * plans * LONG_S for plans, seconds in races.each)
    search = with_long_steps(monkeypatch, Long(), steps=1_000, time_limit_s=50.0, compiler=True)
    search.run()
    assert "no compilation was tried: the rest of the time limit" in search.notes[-1]


def test_nothing_is_compiled_that_no_race_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Long()
    search = with_long_steps(monkeypatch, races, steps=1_000, time_limit_s=5.0, compiler=True)
    monkeypatch.setattr(module, "profile_step", lambda program: None)
    assert search.run() == BASELINE
    assert not any("compile" in name for name in races.raced)
    assert search.notes == ["a time limit of 5 s is too short to compare any plan with the baseline; give it more"]


def test_it_is_said_where_nothing_could_be_told_in_the_time_that_the_run_pays_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searching(monkeypatch, Blind())
    assert search.run() == BASELINE
    assert "too little was measured" in search.notes[-1]


@pytest.mark.parametrize(
    ("left_s", "speed", "winner", "says"),
    [
        (2.0, 1.2, BASELINE, "a race and a proof take about 3 s, and 2 s are left of the third of the time until"),
        (10.0, 0.5, BASELINE, "no compilation was tried: it takes about 15 s, and 10 s are left of the third"),
        (10.0, 1.2, "optimizer=fused", "no compilation was tried: it takes about 15 s, and 10 s are left"),
        (1e6, 1.2, "compile=package", ""),
    ],
)
def test_nothing_is_begun_that_takes_longer_than_what_is_left_until_a_run_is_to_stop(
    left_s: float, speed: float, winner: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 10 ms, of which a proof takes 250."""
    monkeypatch.setattr("hotloop.core.processes.time", SimpleNamespace(monotonic=lambda: 100.0))
    lowered = module.lower
    monkeypatch.setattr(module, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none")))
    monkeypatch.setattr(module, "profile_step", lambda program: HALF)
    races, deadline = Long(optimizer__fused=speed, compile__package=2.0), Deadline.minus(100.0 + 3 * left_s)
    search = searching(monkeypatch, races, compiler=True, deadline=deadline, task=family("mlp"))
    assert search.run() == winner
    assert deadline.is_met is bool(says) and any(says in note for note in [*search.notes, ""])
    assert all(seconds <= max(left_s - 2.5, 0.2) for _, seconds in races.each)


def test_a_proof_is_not_begun_that_takes_longer_than_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Races):
        def timing(self, entrant: Any, steps: int) -> Timing:
            now[0] += 4.0
            return super().timing(entrant, steps)

    monkeypatch.setattr("hotloop.core.processes.time", SimpleNamespace(monotonic=lambda: now[0]))
    search = searching(monkeypatch, Slow(optimizer__fused=1.2), deadline=Deadline(10.0), task=family("mlp"))
    assert search.run() == BASELINE
    assert "optimizer=fused was not proven: that takes about 2 s, and 0 s are left" in search.notes[-1]


def test_it_is_said_where_a_run_that_is_to_stop_leaves_too_little_for_any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.core.processes.time", SimpleNamespace(monotonic=lambda: 0.0))
    least = Budget.of(0.01, None, None)
    deadline = Deadline(least.min_race_s() + least.proof_s + 0.001)
    search = searching(monkeypatch, Long(), deadline=deadline, task=family("mlp"))
    assert search.run() == BASELINE
    assert "until stop-after" in search.notes[-1] and "too little to compare any plan" in search.notes[-1]


def test_how_many_plans_a_race_has_time_for() -> None:
    assert is_run_too_short(500) and not is_run_too_short(5_000) and not is_run_too_short(None)
    assert Budget.of(LONG_S, 600, None).max_first_plans(7) < Budget.of(LONG_S, 11_730, None).max_first_plans(7) == 7
    assert Budget.of(1e-3, 100_000, None).max_first_plans(12) == 12
    assert Budget.of(LONG_S, 600, 1.0).max_first_plans(7) == 0  # not even for one
    assert Budget.of(LONG_S, 600, 8 * 2 * LONG_S).max_first_plans(7) == 1


# ---------------------------------------------------------------- plans of several axes


def really_racing(patch: pytest.MonkeyPatch, seconds: Callable[[Plan], float], **given: Any) -> module.PlanSearch:
    """A search with real races, in which a step takes so many seconds under a plan, by a clock alone."""
    as_it_is, real, now = EagerStep.__call__, module.measure, [0.0]

    def step(self: EagerStep, *batch: Any) -> Any:
        now[0] += seconds(self.parts.plan)
        return as_it_is(self, *batch)

    search = searching(patch, Races(), task=a_task(optimizer=torch.optim.Adam, epochs=2_000), **given)
    patch.setattr(EagerStep, "__call__", step)
    patch.setattr(module, "measure", partial(real, clock=lambda: now[0]))
    return search


def test_what_wins_on_several_axes_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a race of real Programs, where one axis wins more than another."""

    def seconds(plan: Plan) -> float:
        return 0.02 / (1.8 if plan.threads else 1.0) / (1.3 if plan.optimizer == "fused" else 1.0)

    search = really_racing(monkeypatch, seconds, steps=100_000, threads=2)
    found = search.run()
    assert "optimizer=fused" in found and "threads=" in found
    assert search.timings[found].ratio == pytest.approx(1.8 * 1.3, rel=0.01)


RULES = Plan(device="cpu", optimizer="fused", layout="channels_last")


@pytest.mark.parametrize("steps", [8_000, 100_000])
def test_the_plan_of_the_rules_is_a_rival_of_its_own(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    class Together(Races):
        """Each of its axes alone wins nothing."""

        def timing(self, entrant: Any, steps: int) -> Timing:
            found = super().timing(entrant, steps)
            fast = {"ratio": 1.5, "step_ms": STEP_MS / 1.5, "run_s": 1.0, "verdict": "faster"}
            return found.model_copy(update=fast) if entrant.plan == RULES else found

    search = searching(monkeypatch, Together(), steps=steps, rules=RULES)
    assert search.run() == RULES.brief()
    assert not search.left_open


def left_open(patch: pytest.MonkeyPatch, races: Races, parity: str = "bitwise", **given: Any) -> bool:
    search = searching(patch, races, rules=RULES, prove=proving(parity), **given)
    assert search.run() == BASELINE
    return search.left_open


def test_what_speaks_against_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_open(monkeypatch, Races(), steps=100)
    assert left_open(monkeypatch, Blind())
    assert left_open(monkeypatch, Races(optimizer__fused=1.031), steps=8_000)  # faster, by less than a proof takes
    assert not left_open(monkeypatch, Races(optimizer__fused=1.5), parity="broken")
    assert not left_open(monkeypatch, Races(optimizer__fused=0.5))
    assert not left_open(monkeypatch, Races())
    assert not left_open(monkeypatch, Races(), failed={RULES.brief(): "no room"})


@pytest.mark.parametrize(("behind", "pairs"), [(2.5, 2), (1.1, 4)])
def test_a_plan_that_is_left_out_early_is_known_to_be_slower(
    behind: float, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so few pairs that no interval can be given, however much time there is."""
    rules = Plan(device="cpu", optimizer="fused")
    search = really_racing(
        monkeypatch, lambda plan: 0.02 * (1.0 if plan == Plan(device="cpu") else behind), rules=rules, time_limit_s=60.0
    )
    assert search.run() == BASELINE
    rivals = [timing for timing in search.timings.values() if timing.name != BASELINE]
    assert rivals and all(one.left_out and one.verdict is None and one.windows == pairs for one in rivals)
    assert search.has_results and not search.left_open and search.notes == []


@pytest.mark.parametrize(
    ("axes", "says"),
    [({}, "every axis that a search changes but threads, and"), ({"threads": 1}, "search changes, and"), (None, "")],
)
def test_a_plan_that_leaves_next_to_nothing_open_is_said_to(
    axes: dict[str, Any] | None, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a run's own does, which names every axis."""
    monkeypatch.setattr(module.PlanSearch, "run", lambda search: search._stop_searching("nothing is raced here"))
    given = Plan(device="cpu").with_axes(optimizer="fused")
    (tmp_path / "plan.toml").write_text(given.to_toml())
    plan = given if axes is None else Plan.read(tmp_path / "plan.toml").with_axes(**axes)
    notes = hotloop.tune(a_task(epochs=100), plan=plan, progress=False).notes
    assert any("the plan sets" in note for note in notes) is bool(says) and any(says in note for note in notes)


# ---------------------------------------------------------------- streams, and steps that fail


class Samples(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(4), 1)] * 200)


def weighted() -> Any:
    every = torch.utils.data.TensorDataset(torch.zeros(200, 4), torch.ones(200, dtype=torch.int64))
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(200), 200)
    return torch.utils.data.DataLoader(every, batch_size=10, sampler=sampler)


OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "a stream": {"data": Samples(), "batch_size": 10},
    "a sampler": {"data": weighted(), "batch_size": None},
}


@pytest.mark.parametrize("data", OF_THEIR_OWN)
def test_where_nothing_can_be_proven_nothing_is_raced_and_the_rules_have_their_way(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "lower", lambda task, plan: pytest.fail("it was lowered"))
    fields = OF_THEIR_OWN[data] | {"model": lambda: torch.nn.Linear(4, 3), "optimizer": torch.optim.Adam}
    task = a_task(epochs=10_000, **fields)
    for time_limit in (None, "1s"):
        verdict = hotloop.tune(task, device="cpu", time_limit=time_limit, progress=False)
        assert [timing.name for timing in verdict.plans] == [verdict.winner] == [BASELINE]
        assert verdict.left_open and "its data has an order of its own, so no plan can be proven" in verdict.notes[0]
    plan, told = tune.cached_or_tuned_plan(
        LoadedTask(task, None, {}), PlanRequest.from_value("auto", {"device": "cpu"})
    )
    assert plan is None and "the plan is that of the rules, as without --tune" in told


def test_nothing_is_raced_where_a_proof_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "free_memory_bytes", lambda device: 1 << 10)
    verdict = hotloop.tune(a_task(epochs=10_000), device="cpu", time_limit="1s", progress=False)
    assert [timing.name for timing in verdict.plans] == [verdict.winner] == [BASELINE] and verdict.left_open
    assert "a proof takes about" in verdict.notes[0] and "none was raced" in verdict.notes[0]


class Raising(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"loss": torch.nn.BCELoss()}, "expected probabilities from 0 to 1"), ({"model": Raising}, "raised")],
    ids=["a loss that doesn't fit", "a model that raises"],
)
def test_a_step_that_fails_is_reported_as_in_a_race(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        hotloop.tune(a_task(epochs=2_000, **fields), device="cpu", progress=False)


def test_a_look_that_fails_leaves_the_plan_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(program: Any) -> None:
        raise RuntimeError("not to be looked at")

    monkeypatch.setattr(module, "profile_step", raising)
    search = searching(monkeypatch, Races(optimizer__fused=1.3), steps=8_000, compiler=True)
    assert search.run() == "optimizer=fused"


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("room", "most"), [(1, 2), (2, 3), (100, 100)])
def test_plans_race_in_groups_that_there_is_memory_for(monkeypatch: pytest.MonkeyPatch, room: int, most: int) -> None:
    races = Long(optimizer__fused=1.3, layout__channels_last=1.4)
    search = searching(monkeypatch, races, threads=4)
    held: list[int] = []
    lowered = search.pool.get_program
    counted = lambda *given: (lowered(*given), held.append(len(search.pool.programs)))[0]  # noqa: E731
    monkeypatch.setattr(search.pool, "get_program", counted)
    monkeypatch.setattr(module, "max_programs_in_memory", lambda facts, device: room)
    assert set(search.run().split()) == {"optimizer=fused", "layout=channels_last"}
    assert max(plans for plans, _ in races.each) <= most
    assert max(held) <= most


def test_without_memory_for_a_second_plan_none_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(monkeypatch, Races(optimizer__fused=1.3))
    monkeypatch.setattr(module, "max_programs_in_memory", lambda facts, device: 0)
    assert search.run() == BASELINE
    assert any("no memory" in note and "optimizer=fused" in note for note in search.notes)


def test_a_large_model_leaves_room_for_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = feasibility_facts(a_task(), Plan())[0].model_copy(update={"parameters": 138_000_000})
    monkeypatch.setattr(module, "free_memory_bytes", lambda device: 16 << 30)
    assert 1 <= module.max_programs_in_memory(facts, "cpu") <= 3
    assert module.max_programs_in_memory(facts.model_copy(update={"parameters": 1_000}), "cpu") > 100
