"""Faults planted in resuming, one at a time: each must show in what the run ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.core.random.rng import RandomStreams
from hotloop.core.state import State
from hotloop.data.order import Order
from hotloop.lowering.program import Program
from hotloop.training.loop import TrainingLoop
from hotloop.training.run import Run
from tests.support.killed_training import EPOCHS, KILLED_AT, train
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.full_state_task import task

Restore = Callable[[Program, State], None]
RESTORE: Restore = Program.restore


def not_restored(part: str) -> Restore:
    """Leaves one part of the State as a fresh Program has it."""

    def restore(program: Program, state: State) -> None:
        RESTORE(program, replace(state, **{part: getattr(program.state(), part)}))

    return restore


def moved(**by: int) -> Restore:
    """Goes on at another position."""

    def restore(program: Program, state: State) -> None:
        position = replace(state.position, **{key: getattr(state.position, key) + count for key, count in by.items()})
        RESTORE(program, replace(state, position=position))

    return restore


def then(change: Callable[[Program], Any]) -> Restore:
    """Changes something after all was restored."""

    def restore(program: Program, state: State) -> None:
        RESTORE(program, state)
        change(program)

    return restore


@torch.no_grad()
def flip_a_bit(program: Program) -> None:
    next(program.model.parameters()).data.view(torch.int32).view(-1)[0].bitwise_xor_(1)


def unless(stream: str, reseed: Callable[..., int | None]) -> Callable[..., int | None]:
    """Reseeds all streams but one."""
    return lambda self, *path: 0 if path[0] == stream else reseed(self, *path)


def step_back(program: Program) -> None:
    for values in program.optimizer.state.values():
        values["step"] -= 1


def other_momentum(program: Program) -> None:
    program.optimizer.param_groups[0]["betas"] = (0.9, 0.999)


FAULTS: dict[str, Restore] = {
    # A scale of the loss is there under fp16 alone: tests/lowering/test_cpu_plans.py. Frozen parameters and modes are in
    # tests/core/task_parts/test_module_modes.py, what modules save by themselves in tests/core/test_state.py, plain values in tests/lowering/object_state/test_attributes.py,
    # and values that the Task's `state` names in tests/training/test_rehearsal.py.
    **{
        f"{field.name} not restored": not_restored(field.name)
        for field in fields(State)
        if field.name not in ("scaler", "extra", "trainable", "in_eval", "attributes", "named")
    },
    "the order starts again with the epoch": moved(batch=-7),
    "a batch is skipped": moved(batch=1),
    "a batch is repeated": moved(batch=-1),
    "steps are miscounted": moved(step=1),
    "epochs are miscounted": moved(epoch=-1),
    "one bit of a weight": then(flip_a_bit),
    "the optimizer's count of steps": then(step_back),
    "the optimizer's momentum, which the schedule moves": then(other_momentum),
    "the schedule is one step ahead": then(lambda program: program._step.schedule.step()),
    "the schedule counts from one before": then(lambda program: vars(program._step.schedule).update(last_epoch=19)),
}


def is_noticed(whole: Path, path: Path) -> bool:
    """Whether a run ended otherwise than the whole one, or its last checkpoint contradicts itself."""
    return Run.open(path).checkpoints.newest() is None or disagreements(whole, path) != []


@pytest.mark.more
def test_without_a_fault_there_is_no_disagreement(whole: Path, copy: Path) -> None:
    train(copy)
    assert disagreements(whole, copy) == []


@pytest.mark.few(
    "parameters not restored",
    "buffers not restored",
    "drawn not restored",
    "position not restored",
    "the order starts*",
    "one bit of a weight",
    "the schedule is one*",
    "a batch is skipped",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_restoring_is_noticed(whole: Path, copy: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "restore", FAULTS[fault])
    train(copy)
    assert is_noticed(whole, copy)


@pytest.mark.parametrize("stream", ["step", "sample", "augment"])
def test_draws_that_are_not_reseeded_are_noticed(
    whole: Path, copy: Path, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reseed_python", "reseed_torch"):
        reseed = getattr(RandomStreams, name)
        monkeypatch.setattr(RandomStreams, name, unless(stream, reseed))
    train(copy)
    assert is_noticed(whole, copy)


def test_another_order_is_noticed(whole: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order.epoch
    monkeypatch.setattr(Order, "epoch", lambda self, epoch: order(self, 0))
    train(copy)
    assert is_noticed(whole, copy)


@pytest.mark.more
@pytest.mark.parametrize("part", ["history", "best"])
def test_a_forgotten_history_or_best_epoch_is_noticed(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back = TrainingLoop._restore_checkpoint

    def forgetful(self: Any) -> None:
        go_back(self)
        setattr(self, part, {"history": [], "best": None}[part])

    first_is_best = replace(task(EPOCHS), goal="max")  # of a loss that falls
    train(tmp_path / "whole", first_is_best)
    train(tmp_path / "run", first_is_best, until=KILLED_AT)
    monkeypatch.setattr(TrainingLoop, "_restore_checkpoint", forgetful)
    train(tmp_path / "run", first_is_best)
    assert is_noticed(tmp_path / "whole", tmp_path / "run")
