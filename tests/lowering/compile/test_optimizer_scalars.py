"""What a compiled step takes of the optimizer's numbers: whatever a schedule changes, wherever it is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hotloop
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.steps import compiled_step
from hotloop.plan import Plan
from tests.lowering.steps.test_cuda_graph import on_a_stand_in  # noqa: F401  a fixture, for all tests here
from tests.support.programs import a_task, advance

STEPS = 12  # into the third epoch


def assert_as_eager(task: hotloop.Task, plan: Plan) -> None:
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


@pytest.mark.few("compile=step", "graphs=step")
@pytest.mark.parametrize("plan", [Plan(compile="package"), Plan(compile="step"), Plan(graphs="step")], ids=Plan.brief)
def test_a_rate_in_a_tensor_is_read_at_each_step(plan: Plan) -> None:
    """A schedule changes such a tensor in place: it stays the object that it was."""
    task = a_task(optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), schedule=halving)
    assert_as_eager(task, plan)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(captured: CapturedStep, *others: Any) -> Callable[[list[torch.Tensor]], Any]:
        return lambda flat: captured.graph(*flat)

    monkeypatch.setattr(compiled_step, "_compile", run)


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
def test_while_a_setting_is_another_than_when_the_step_was_captured_steps_run_eagerly(plan: Plan) -> None:
    decay = torch.tensor(0.125)
    task = a_task(optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), weight_decay=decay))
    said: list[str] = []
    programs = [hotloop.lower(task, plan, said.append), hotloop.lower(task)]
    ran = []
    for setting in (0.125, 0.5, 0.125):
        decay.fill_(setting)
        for program in programs:
            advance(program, 5)  # an epoch, whose last batch is incomplete
        ran.append(programs[0].compiled_steps)
    state, expected = (program.state() for program in programs)
    torch.testing.assert_close(state.parameters, expected.parameters, rtol=1e-4, atol=1e-6)
    assert ran[0] == ran[1] == ran[2] - 4
    told = "the optimizer's 0/weight_decay is 0.5, and 0.125 in the compiled step: while that is so, steps run eagerly"
    assert [line for line in said if "weight_decay" in line] == [told]


def in_turn(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """A warm-up, and then a cycle that moves the momentum, too: from the seventh step on."""
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), cycling(optimizer, total)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "plan", [Plan(compile="step"), Plan(graphs="step"), Plan(graphs=2, residency="device")], ids=Plan.brief
)
def test_a_schedule_that_first_moves_another_number_later_goes_on_eagerly(plan: Plan) -> None:
    """Two steps in one replay are the sixth and the seventh: the number moves between them."""
    task = a_task(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), schedule=in_turn, epochs=4)
    assert_as_eager(task, plan)
