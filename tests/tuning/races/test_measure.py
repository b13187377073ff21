"""Races of real Programs: what is inside of the clock, what is found, and what fails."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from bench.race_verdicts import MARKED, delayed, one
from hotloop.core.records.race import best_plan_name
from hotloop.errors import DiskError, HotloopError, InsufficientMemoryError, MemoryExhausted
from hotloop.lowering.build import lower
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.tuning.races.measure import Contender, RaceMeasurement, measure
from hotloop.tuning.races.rounds import ContenderTimes
from tests.support.programs import a_task
from tests.support.tasks.timed_tasks import CPU, TASKS, Clock, standing_still


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return standing_still(monkeypatch)


def entrants(task: Task, **plans: Plan) -> list[Contender]:
    return [Contender(name, lambda plan=plan: lower(task, plan), plan) for name, plan in plans.items()]  # type: ignore[misc]


def raced(task: Task, clock: Clock, steps: int | None = 1000, **plans: Plan) -> RaceMeasurement:
    return measure(entrants(task, **plans), "baseline", steps=steps, time_limit_s=10, clock=clock)


# --- what a race finds


def test_a_race_by_a_clock_of_its_own(clock: Clock) -> None:
    found = raced(a_task(), clock, baseline=CPU, same=CPU, slow=MARKED)
    base, same, slow = found.plans
    assert [plan.name for plan in found.plans] == ["baseline", "same", "slow"] and found.notes == []
    assert base.step_ms == pytest.approx(10) and slow.step_ms == pytest.approx(11)
    assert (same.verdict, slow.verdict) == ("no difference", "slower")
    assert slow.ratio == pytest.approx(10 / 11)
    assert base.samples_per_s == pytest.approx(24 / 5 / 0.01, rel=0.05)  # batches of 5, the last of 4
    assert slow.plan == MARKED.model_dump() and slow.failure is None
    assert base.run_s == pytest.approx(1000 * 0.01 + 0.01)  # and the first step
    assert base.peak_memory_bytes and base.feed_ms is not None


def test_starting_and_compiling_are_apart_and_outside_of_the_steps(clock: Clock, monkeypatch) -> None:
    task = a_task()

    def slowly() -> Program:
        clock.now += 50.0
        program = lower(task, Plan(device="cpu", optimizer="foreach"))
        program.compile_s = 30.0
        return program

    quick = dict(baseline=MARKED)
    rivals = [*entrants(task, **quick), Contender("compiled", slowly)]
    found = measure(rivals, "baseline", steps=1000, time_limit_s=10, clock=clock)
    base, compiled = found.plans
    assert compiled.startup_s == pytest.approx(20.01) and compiled.compile_s == 30.0
    assert compiled.step_ms == pytest.approx(10) and compiled.verdict == "faster"
    assert compiled.run_s == pytest.approx(50.01 + 10)
    assert compiled.pays_after == pytest.approx((50.01 - 0.011) / 0.001, abs=1)
    assert base.pays_after is None


def test_what_an_epoch_takes_beside_its_steps_counts_for_the_run_alone(clock: Clock) -> None:
    """A compiled step of a Task with callbacks looks once in an epoch, here of five batches, what they change."""

    def looking(task: Task) -> Program:
        program = lower(task, Plan(device="cpu", optimizer="foreach"))
        program._step.recheck_s = 0.2
        return program

    for callbacks, looking_ms in ([print], 40.0), ([], 0.0):
        task = a_task(callbacks=callbacks)
        rivals = [*entrants(task, baseline=MARKED), Contender("compiled", partial(looking, task))]
        compiled = measure(rivals, "baseline", steps=1000, time_limit_s=10, clock=clock).plans[1]
        assert compiled.step_ms == pytest.approx(10) and compiled.verdict == "faster"
        assert compiled.looking_ms == pytest.approx(looking_ms)
        assert compiled.run_s == pytest.approx(compiled.starts_s + 1000 * (0.01 + looking_ms / 1e3))
        assert (compiled.pays_after is None) is bool(callbacks)


def test_a_first_step_that_takes_long_is_part_of_the_start(clock: Clock, monkeypatch) -> None:
    task, as_it_is = a_task(), EagerStep.__call__
    seen: set[int] = set()

    def step(self: EagerStep, *given: Any) -> Any:
        if id(self) not in seen:
            seen.add(id(self))
            clock.now += 5.0
        return as_it_is(self, *given)

    monkeypatch.setattr(EagerStep, "__call__", step)
    kept: list[Program] = []  # so that no id is used twice

    def lowering() -> Program:
        kept.append(lower(task, CPU))
        return kept[-1]

    base = measure([Contender("baseline", lowering)] * 1, "baseline", steps=10, time_limit_s=1, clock=clock).plans[0]
    assert base.startup_s == pytest.approx(5.01) and base.step_ms == pytest.approx(10)


@pytest.mark.more
def test_reading_data_counts_for_each_plan_that_needs_it(monkeypatch) -> None:
    """The data is read once; a plan that finds it there would have had to read it, too."""

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((6,), float(index)), index % 3

    task = a_task(data=Numbers(), deterministic=True)
    host = Plan(device="cpu", residency="host")
    lower(task, host).close()
    [(name, (_, at))] = task.roles.reading_s.items()
    task.roles.reading_s[name] = (1000.0, at)
    found = measure(entrants(task, baseline=CPU, host=host), "baseline", steps=4, time_limit_s=0.01)
    assert [plan.startup_s > 1000 for plan in found.plans if plan.startup_s is not None] == [False, True]


def test_a_plan_that_cannot_be_lowered_leaves_the_race_to_the_others(clock: Clock) -> None:
    found = raced(a_task(), clock, baseline=CPU, graphs=Plan(device="cpu", graphs="step"), slow=MARKED)
    base, graphs, slow = found.plans
    assert graphs.failure and "graphs are for CUDA devices" in graphs.failure and graphs.step_ms is None
    assert graphs.plan["graphs"] == "step" and slow.verdict == "slower" and base.failure is None


def test_a_plan_that_was_left_out_in_a_quiet_hour_is_not_the_fastest_for_that(clock: Clock, monkeypatch) -> None:
    """After 12 rounds the machine becomes three times as slow: times of one plan's windows aren't those of another's."""
    quiet, busy = [0.01] * 12, [0.03] * 188

    def rounds(lanes: list[ContenderTimes], baseline: ContenderTimes, *_: Any) -> None:
        base, left_out, stayed = lanes
        for lane in lanes:
            lane.windows.window(1)
        base.times = quiet + busy
        left_out.times, left_out.is_running = [took / 1.2 for took in quiet], False
        stayed.times = [took / 1.5 for took in quiet + busy]

    monkeypatch.setattr("hotloop.tuning.races.measure.run_rounds", rounds)
    found = raced(a_task(), clock, baseline=CPU, left=CPU, stayed=Plan(device="cpu", optimizer="foreach"))
    assert best_plan_name(found.plans, "baseline", proven=False) == "stayed"
    base = found.plans[0]
    for plan in found.plans:
        assert plan.step_ms == pytest.approx(base.step_ms / plan.ratio)
        assert plan.run_s == pytest.approx(plan.startup_s + plan.compile_s + plan.step_ms)  # 1000 steps
        assert (plan.pays_after is None) == (plan is base)


LACKING: dict[str, tuple[Exception, bool]] = {
    "memory": (torch.OutOfMemoryError("no room"), True),
    "memory, as hotloop says it": (MemoryExhausted("no room"), True),
    "room for data": (InsufficientMemoryError("no room"), True),
    "room on the disk": (OSError(28, "No space left on device"), True),
    "room on the disk, as hotloop says it": (DiskError("the disk is full"), True),
    "anything else": (RuntimeError("no such kernel"), False),
}


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("where", ["lowering", "a step"])
def test_what_was_lacking_is_told_from_other_failures(name: str, where: str, clock: Clock, monkeypatch) -> None:
    task, (error, short) = a_task(), LACKING[name]
    as_it_is, count = EagerStep.__call__, {"steps": 0}

    def fails(*_: Any) -> Any:
        raise error

    def step(self: EagerStep, *given: Any) -> Any:
        marked = self.parts.plan == MARKED
        count["steps"] += marked
        return fails() if marked and count["steps"] > 70 else as_it_is(self, *given)

    monkeypatch.setattr(EagerStep, "__call__", step)
    rival = Contender("rival", fails if where == "lowering" else lambda: lower(task, MARKED), MARKED)
    found = measure([*entrants(task, baseline=CPU), rival], "baseline", steps=9, time_limit_s=10, clock=clock)
    assert found.plans[1].failure and found.plans[1].short_of_memory == short


@pytest.mark.more
@pytest.mark.parametrize(
    ("ends", "short"),
    [("kill -9 $$", True), ('exec g++ -nostdinc "$@"', True), ("exit 1", False)],
    ids=["killed, as where memory is short", "without headers", "broken"],
)
def test_a_compiler_that_was_killed_or_lacks_headers_says_nothing_of_the_plan(
    ends: str, short: bool, clock: Clock, tmp_path: Path, monkeypatch
) -> None:
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\n{ends}\n')
    compiler.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        found = raced(a_task(), clock, baseline=CPU, compiled=CPU.with_axes(compile="package")).plans[1]
    assert "can't be compiled" in (found.failure or "") and found.short_of_memory is short


@pytest.mark.parametrize("when", ["before it is read", "while it is read"])
def test_data_that_memory_has_no_room_for_now_is_a_lack_of_memory(when: str, clock: Clock, monkeypatch) -> None:
    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((6,), float(index)), index % 3

    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(
        "hotloop.lowering.transforms.residency.device_free_bytes", lambda device: 100 if when[0] == "b" else None
    )
    if when[0] == "w":
        monkeypatch.setattr("hotloop.data.feeds.in_memory._read_table", full)
    task = a_task(data=Numbers(), deterministic=True)
    found = raced(task, clock, baseline=CPU, host=CPU.with_axes(residency="host")).plans[1]
    assert "can't be read into memory" in (found.failure or "") and found.short_of_memory


@pytest.mark.parametrize("broken", ["slow", "baseline"])
def test_a_step_that_breaks_in_the_middle(broken: str, clock: Clock, monkeypatch) -> None:
    as_it_is, count = EagerStep.__call__, {"steps": 0}

    def step(self: EagerStep, *given: Any) -> Any:
        if (self.parts.plan.workers == 0) == (broken == "slow"):
            count["steps"] += 1
            if count["steps"] > 70:
                raise RuntimeError("planted")
        return as_it_is(self, *given)

    monkeypatch.setattr(EagerStep, "__call__", step)
    task = a_task()
    if broken == "baseline":
        with pytest.raises(HotloopError, match="planted"):
            raced(task, clock, baseline=CPU, slow=MARKED)
        return
    base, slow = raced(task, clock, baseline=CPU, slow=MARKED).plans
    assert slow.failure and "planted" in slow.failure and slow.verdict is None
    assert base.step_ms == pytest.approx(10)


def test_a_time_too_short_says_so(clock: Clock) -> None:
    rivals = entrants(a_task(), baseline=CPU, slow=MARKED)
    found = measure(rivals, "baseline", steps=1000, time_limit_s=0.001, clock=clock)
    assert [plan.verdict for plan in found.plans] == [None, None] and found.plans[1].windows == 1
    assert len(found.notes) == 1 and "too short to measure slow" in found.notes[0]


def test_a_run_of_one_step_can_be_raced(clock: Clock) -> None:
    task = a_task(batch_size=24, **TASKS["a schedule with an end"])
    base, slow = raced(task, clock, steps=1, baseline=CPU, slow=MARKED).plans
    assert base.failure is None and slow.failure is None and slow.verdict == "slower"


def test_what_lowering_trips_over_is_a_failure_too(clock: Clock) -> None:
    def trips() -> Program:
        raise ZeroDivisionError("planted")

    task = a_task()
    rivals = [*entrants(task, baseline=CPU), Contender("odd", trips)]
    found = measure(rivals, "baseline", steps=None, time_limit_s=1, clock=clock)
    assert found.plans[1].failure and "ZeroDivisionError: planted" in found.plans[1].failure


def test_the_callers_generators_stay_as_they_were(clock: Clock) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    raced(a_task(**TASKS["buffers and draws"]), clock, baseline=CPU, slow=MARKED)
    assert torch.get_rng_state().equal(before)


# --- with a real clock


@pytest.fixture
def many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many short windows, however long they take on a busy machine."""
    monkeypatch.setattr("hotloop.tuning.races.rounds._WINDOW_S", {"cpu": 0.005})
    monkeypatch.setattr("hotloop.tuning.races.rounds.is_precise", lambda ratio: ratio.pairs >= 40)


def test_a_plan_against_itself_makes_no_difference(many_pairs: None) -> None:
    timing, verdict = one("5m")
    assert timing.verdict == "no difference" and verdict.winner == "baseline"


def test_a_planted_delay_is_found(many_pairs: None) -> None:
    """Of the step's own length, since the machine of a test may be busy; bench/race_verdicts.py plants a tenth."""
    with delayed(1.0):
        timing, verdict = one("5m")
    assert timing.verdict == "slower" and verdict.winner == "baseline"
