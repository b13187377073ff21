"""Races of real Programs: what is inside of the clock, what is put back, what fails, and who wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import nn

import hotloop
from bench.race_verdicts import MARKED, delayed, one
from hotloop import contests
from hotloop.errors import DiskError, HotloopError, MemoryExhausted, PlanError, RoomError, TaskError
from hotloop.interrupts import Terminated
from hotloop.lowering import Program, lower
from hotloop.lowering.step import EagerStep
from hotloop.measuring import Entrant, load, measure
from hotloop.measuring.clocks import peak_of_step
from hotloop.measuring.load import Used, busy_note, cores_of_others
from hotloop.measuring.loading import feed_time
from hotloop.measuring.racing import Measured
from hotloop.measuring.rounds import Lane
from hotloop.measuring.runner import Runner
from hotloop.plan import Plan
from hotloop.report.contest import sentence
from hotloop.rivals import Contest
from hotloop.state import differences
from hotloop.task import Task
from hotloop.taskfile import Loaded
from hotloop.verdicts import Parity, Verdict, best_of
from tests.cpu.programs import a_task

CPU = Plan(device="cpu")


class Clock:
    """Stands still but for what is planted; so a race of real Programs comes out the same each time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Iterator[Clock]:
    """Each step takes 10 ms, by this clock alone; one of the marked plan a tenth more."""
    clock, as_it_is = Clock(), EagerStep.__call__

    def step(self: EagerStep, batch: Any, samples: int, number: int) -> Any:
        clock.now += 0.011 if self.parts.plan.workers == 0 else 0.01
        return as_it_is(self, batch, samples, number)

    monkeypatch.setattr(EagerStep, "__call__", step)
    return clock


def entrants(task: Task, **plans: Plan) -> list[Entrant]:
    return [Entrant(name, lambda plan=plan: lower(task, plan), plan) for name, plan in plans.items()]  # type: ignore[misc]


def raced(task: Task, clock: Clock, steps: int | None = 1000, **plans: Plan) -> Measured:
    return measure(entrants(task, **plans), "baseline", steps=steps, time_limit_s=10, clock=clock)


# --- what a Runner does

TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": dict(optimizer=torch.optim.Adam, average=0.9),
    "a schedule with an end": dict(
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
    ),
    "a plateau": dict(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau, schedule_every="epoch"),
    "buffers and draws": dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    ),
    "two epochs": dict(epochs=2),
}


@pytest.mark.parametrize("name", TASKS)
def test_windows_go_on_past_the_end_of_the_run_and_the_state_comes_back(name: str, clock: Clock) -> None:
    program = lower(a_task(**TASKS[name]), CPU)
    before = program.state()
    runner = Runner(program, clock)
    assert runner.warm_up() == pytest.approx((0.01, 0.01))
    assert differences(before, program.state()) == []
    runner.settle(3)
    assert runner.window(33) == pytest.approx(0.33)  # a run has 5 steps, or 10
    assert runner.window(4) == pytest.approx(0.04)
    assert differences(before, program.state()) != []
    runner.put_back()
    assert differences(before, program.state()) == []


def test_a_state_that_is_not_put_back_is_seen(clock: Clock, monkeypatch) -> None:
    program = lower(a_task(), CPU)
    before = program.state()
    monkeypatch.setattr(Runner, "put_back", lambda self: None)
    Runner(program, clock).warm_up()
    assert differences(before, program.state()) != []


def test_a_run_that_begins_again_does_as_the_first_time(clock: Clock, monkeypatch) -> None:
    """The data goes on to its next epoch, so that loaders stay as they are; all else is as at the beginning."""
    begun: list[Any] = []
    restore = Program.restore
    monkeypatch.setattr(Program, "restore", lambda self, state: begun.append(state) or restore(self, state))
    program = lower(a_task(epochs=2), CPU)
    before = program.state()
    Runner(program, clock).window(25)
    assert [state.position.epoch for state in begun] == [2, 4]
    for state in begun:
        assert all(path.startswith("/position") for path in differences(before, state))


def test_putting_back_is_outside_of_the_clock(clock: Clock, monkeypatch) -> None:
    restore = Program.restore

    def slow(self: Program, state: Any) -> None:
        clock.now += 7.0
        restore(self, state)

    monkeypatch.setattr(Program, "restore", slow)
    assert Runner(lower(a_task(), CPU), clock).window(20) == pytest.approx(0.2)
    assert clock.now > 120  # it did happen


def test_a_step_that_draws_late_is_timed_all_the_same(clock: Clock) -> None:
    class Draws(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Draws.calls += 1
            return super().forward(x) * (1.0 if Draws.calls < 60 else float(np.random.rand()))

    runner = Runner(lower(a_task(model=lambda: Draws(6, 3), epochs=40), CPU), clock)
    assert [runner.window(30) for _ in range(5)] == pytest.approx([0.3] * 5)


def test_loaders_start_once(monkeypatch) -> None:
    started: list[int] = []

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((6,), float(index)), index % 3

    program = lower(a_task(data=Numbers()), CPU)
    start = type(program.feed)._start  # type: ignore[attr-defined]
    monkeypatch.setattr(
        type(program.feed), "_start", lambda self, *place: started.append(1) or start(self, *place), raising=True
    )
    runner = Runner(program)
    for _ in range(3):
        runner.window(10)  # the run's 4 steps end in it more than once
    assert started == [1]
    program.close()


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
    rivals = [*entrants(task, **quick), Entrant("compiled", slowly)]
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
        program._step.look_s = 0.2
        return program

    for callbacks, looking_ms in ([print], 40.0), ([], 0.0):
        task = a_task(callbacks=callbacks)
        rivals = [*entrants(task, baseline=MARKED), Entrant("compiled", partial(looking, task))]
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

    base = measure([Entrant("baseline", lowering)] * 1, "baseline", steps=10, time_limit_s=1, clock=clock).plans[0]
    assert base.startup_s == pytest.approx(5.01) and base.step_ms == pytest.approx(10)


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
    assert graphs.failure and "graphs are CUDA's" in graphs.failure and graphs.step_ms is None
    assert graphs.plan["graphs"] == "step" and slow.verdict == "slower" and base.failure is None


def test_a_plan_that_was_left_out_in_a_quiet_hour_is_not_the_fastest_for_that(clock: Clock, monkeypatch) -> None:
    """After 12 rounds the machine becomes three times as slow: times of one plan's windows aren't those of another's."""
    quiet, busy = [0.01] * 12, [0.03] * 188

    def rounds(lanes: list[Lane], baseline: Lane, *_: Any) -> None:
        base, left_out, stayed = lanes
        for lane in lanes:
            lane.windows.window(1)
        base.times = quiet + busy
        left_out.times, left_out.running = [took / 1.2 for took in quiet], False
        stayed.times = [took / 1.5 for took in quiet + busy]

    monkeypatch.setattr("hotloop.measuring.racing.run_rounds", rounds)
    found = raced(a_task(), clock, baseline=CPU, left=CPU, stayed=Plan(device="cpu", optimizer="foreach"))
    assert best_of(found.plans, "baseline", proven=False) == "stayed"
    base = found.plans[0]
    for plan in found.plans:
        assert plan.step_ms == pytest.approx(base.step_ms / plan.ratio)
        assert plan.run_s == pytest.approx(plan.startup_s + plan.compile_s + plan.step_ms)  # 1000 steps
        assert (plan.pays_after is None) == (plan is base)


LACKING: dict[str, tuple[Exception, bool]] = {
    "memory": (torch.OutOfMemoryError("no room"), True),
    "memory, as hotloop says it": (MemoryExhausted("no room"), True),
    "room for data": (RoomError("no room"), True),
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
    rival = Entrant("rival", fails if where == "lowering" else lambda: lower(task, MARKED), MARKED)
    found = measure([*entrants(task, baseline=CPU), rival], "baseline", steps=9, time_limit_s=10, clock=clock)
    assert found.plans[1].failure and found.plans[1].short_of_memory == short


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

    monkeypatch.setattr("hotloop.lowering.residency.free_memory", lambda device: 100 if when[0] == "b" else None)
    if when[0] == "w":
        monkeypatch.setattr("hotloop.data.materialise._read", full)
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
    assert len(found.notes) == 1 and "too short to say anything of slow" in found.notes[0]


def test_a_run_of_one_step_can_be_raced(clock: Clock) -> None:
    task = a_task(batch_size=24, **TASKS["a schedule with an end"])
    base, slow = raced(task, clock, steps=1, baseline=CPU, slow=MARKED).plans
    assert base.failure is None and slow.failure is None and slow.verdict == "slower"


def test_what_lowering_trips_over_is_a_failure_too(clock: Clock) -> None:
    def trips() -> Program:
        raise ZeroDivisionError("planted")

    task = a_task()
    rivals = [*entrants(task, baseline=CPU), Entrant("odd", trips)]
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
    monkeypatch.setattr("hotloop.measuring.rounds._WINDOW_S", {"cpu": 0.005})
    monkeypatch.setattr("hotloop.measuring.rounds.settled", lambda ratio: ratio.pairs >= 40)


def test_a_plan_against_itself_makes_no_difference(many_pairs: None) -> None:
    timing, verdict = one("5m")
    assert timing.verdict == "no difference" and verdict.winner == "baseline"


def test_a_planted_delay_is_found(many_pairs: None) -> None:
    """Of the step's own length, since the machine of a test may be busy; bench/race_verdicts.py plants a tenth."""
    with delayed(1.0):
        timing, verdict = one("5m")
    assert timing.verdict == "slower" and verdict.winner == "baseline"


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
    monkeypatch.setattr("hotloop.contests.measure", lambda *a, **k: measure(*a, **k, clock=clock))
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
    asked = Contest((CPU,), MARKED, time_limit="10s")
    verdict = contests.raced(Loaded(a_task(epochs=200), None, {}), asked, prove=each(prove))
    assert (verdict.winner, verdict.ended_by, verdict.ended) == (None, by, f"stopped by {by} at the proof")
    assert verdict.plan("baseline").verdict == "faster" and verdict.plan("baseline").parity is None
    assert "isn't proven" in sentence(verdict)


def test_the_baseline_needs_no_proof(clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr("hotloop.contests.measure", lambda *a, **k: measure(*a, **k, clock=clock))
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
    from hotloop.rivals import Contest

    entries, baseline = Contest(["auto", "auto", OTHER], devices=["cpu", "cuda"], axes={"threads": 1}).entries()
    assert baseline == "baseline on cpu"
    assert list(entries)[:4] == ["baseline on cpu", "auto on cpu", "auto threads=1 on cpu", "optimizer=foreach on cpu"]
    assert {name: wanted.plan.threads for name, wanted in entries.items() if "baseline" in name} == {
        "baseline on cpu": None,
        "baseline on cuda": None,
    }
    assert entries["optimizer=foreach on cuda"].plan == OTHER.with_axes(device="cuda", threads=1)


# --- what is measured beside


def test_peak_memory_of_a_step() -> None:
    """A layer's output of 1000 numbers for each of 5 samples, and its gradient."""
    small, large = (
        peak_of_step(lower(a_task(model=lambda w=w: nn.Sequential(nn.Linear(6, w), nn.ReLU(), nn.Linear(w, 3))), CPU))
        for w in (10, 1000)
    )
    assert small and large and large - small > 2 * 5 * 990 * 4


def test_feeding_alone_is_timed() -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            time.sleep(0.002)
            return torch.full((6,), float(index)), index % 3

    program = lower(a_task(data=Slow()), CPU)
    found = feed_time(program)
    program.close()
    assert found is not None and found >= 5 * 0.002
    assert feed_time(lower(a_task(batch_size=24), CPU)) is None  # one batch alone


def test_the_load_of_others() -> None:
    before = Used(at=10.0, by_all=100.0, by_us=40.0)
    assert cores_of_others(before, Used(at=20.0, by_all=118.0, by_us=50.0)) == pytest.approx(0.8)
    assert cores_of_others(before, Used(at=20.0, by_all=109.9, by_us=50.0)) == 0.0
    assert "0.8 of its 2 cores" in busy_note(0.8, 2) and busy_note(0.1, 2) == "" and busy_note(0.8, 64) == ""


def test_work_on_cores_that_we_may_not_use_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(NamedTuple):
        user: float
        idle: float

    monkeypatch.setattr(load.psutil, "cpu_times", lambda percpu: [Times(10.0, 5.0), Times(500.0, 1.0)])
    monkeypatch.setattr(load.psutil.Process, "cpu_affinity", lambda self: [0], raising=False)
    assert Used.now().by_all == 10.0


def test_a_rehearsal_leaves_the_state_as_it_was() -> None:
    """A search hands the same Program to several races, each of which begins with the first step."""
    program = lower(a_task(), CPU)
    before = program.state()
    measure([Entrant("baseline", lambda: program, CPU)], "baseline", steps=10, time_limit_s=0.01, brief=True)
    assert differences(program.state(), before) == []


def test_our_own_work_is_not_that_of_others() -> None:
    before, until = Used.now(), time.process_time() + 0.5
    while time.process_time() < until:
        pass
    after = Used.now()
    assert after.by_us - before.by_us >= 0.45
    assert after.by_all - before.by_all >= 0.4  # the system counts in hundredths
