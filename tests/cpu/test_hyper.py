"""What a compiled step takes of the optimizer's numbers: whatever a schedule changes, wherever it is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hotloop
from hotloop.errors import PlanError
from hotloop.lowering import compiled
from hotloop.lowering.capture import Captured
from hotloop.plan import Plan
from tests.cpu.programs import a_task, advance
from tests.cpu.test_graphs import on_a_stand_in  # noqa: F401  a fixture, for all tests here

STEPS = 12  # into the third epoch


def assert_as_eager(task: hotloop.Task, plan: Plan) -> None:
    """The same but for rounding."""
    programs = [hotloop.lower(task, one) for one in (plan, Plan())]
    for program in programs:
        advance(program, STEPS)
    state, expected = (program.state() for program in programs)
    torch.testing.assert_close(state.parameters, expected.parameters, rtol=1e-4, atol=1e-6)
    assert state.schedule["last_epoch"] == expected.schedule["last_epoch"]


def halving(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def cycling(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """Moves the momentum, or the first of the betas, with the rate."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)


@pytest.mark.parametrize("plan", [Plan(compile="package"), Plan(compile="step"), Plan(graphs="step")], ids=Plan.brief)
def test_a_rate_in_a_tensor_is_read_at_each_step(plan: Plan) -> None:
    """A schedule changes such a tensor in place: it stays the object that it was."""
    task = a_task(optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), schedule=halving)
    assert_as_eager(task, plan)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the captured step operation by operation."""

    def run(captured: Captured, *others: Any) -> Callable[[list[torch.Tensor]], Any]:
        return lambda flat: captured.graph(*flat)

    monkeypatch.setattr(compiled, "_compiled", run)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("plan", [Plan(compile="step"), Plan(graphs="step")], ids=Plan.brief)
def test_a_schedule_by_epochs_moves_whatever_it_moves(plan: Plan) -> None:
    task = a_task(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        schedule=cycling,
        schedule_every="epoch",
        epochs=4,
    )
    assert_as_eager(task, plan)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("every", ["step", "epoch"])
def test_a_plateau_is_left_as_it_was(every: str) -> None:
    def plateau(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    assert_as_eager(a_task(schedule=plateau, schedule_every=every), Plan(compile="step"))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("plan", [Plan(compile="step"), Plan(graphs="step")], ids=Plan.brief)
def test_a_setting_in_a_tensor_that_nobody_said_would_change_is_an_error_when_it_does(plan: Plan) -> None:
    decay = torch.tensor(0.1)
    task = a_task(optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), weight_decay=decay))
    program = hotloop.lower(task, plan)
    advance(program, 3)
    decay.fill_(0.2)
    with pytest.raises(PlanError, match=r"0/weight_decay has changed to 0\.2.*, which the compiled step holds fixed"):
        advance(program, 1)
