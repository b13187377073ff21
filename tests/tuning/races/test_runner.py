"""What a Runner does in a race of real Programs, and what is measured beside."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hotloop.core.state import differing_paths
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.tuning.races.measure import Contender, measure
from hotloop.tuning.races.runner import Runner, mean_feed_time, measure_peak_memory
from tests.support.programs import a_task
from tests.support.tasks.timed_tasks import CPU, TASKS, Clock, standing_still


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return standing_still(monkeypatch)


# --- what a Runner does


@pytest.mark.parametrize("name", TASKS)
def test_windows_go_on_past_the_end_of_the_run_and_the_state_comes_back(name: str, clock: Clock) -> None:
    program = lower(a_task(**TASKS[name]), CPU)
    before = program.state()
    runner = Runner(program, clock)
    assert runner.warm_up() == pytest.approx((0.01, 0.01))
    assert differing_paths(before, program.state()) == []
    runner.run_untimed(3)
    assert runner.window(33) == pytest.approx(0.33)  # a run has 5 steps, or 10
    assert runner.window(4) == pytest.approx(0.04)
    assert differing_paths(before, program.state()) != []
    runner.restore_state()
    assert differing_paths(before, program.state()) == []


def test_a_state_that_is_not_put_back_is_seen(clock: Clock, monkeypatch) -> None:
    program = lower(a_task(), CPU)
    before = program.state()
    monkeypatch.setattr(Runner, "restore_state", lambda self: None)
    Runner(program, clock).warm_up()
    assert differing_paths(before, program.state()) != []


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
        assert all(path.startswith("/position") for path in differing_paths(before, state))


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


# --- what is measured beside


def test_peak_memory_of_a_step() -> None:
    """A layer's output of 1000 numbers for each of 5 samples, and its gradient."""
    small, large = (
        measure_peak_memory(
            lower(a_task(model=lambda w=w: nn.Sequential(nn.Linear(6, w), nn.ReLU(), nn.Linear(w, 3))), CPU)
        )
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
    found = mean_feed_time(program)
    program.close()
    assert found is not None and found >= 5 * 0.002
    assert mean_feed_time(lower(a_task(batch_size=24), CPU)) is None  # one batch alone


def test_a_rehearsal_leaves_the_state_as_it_was() -> None:
    """A search hands the same Program to several races, each of which begins with the first step."""
    program = lower(a_task(), CPU)
    before = program.state()
    measure([Contender("baseline", lambda: program, CPU)], "baseline", steps=10, time_limit_s=0.01, brief=True)
    assert differing_paths(program.state(), before) == []
