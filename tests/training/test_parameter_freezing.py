"""Callbacks that freeze and thaw parameters, or give the optimizer more of them, and runs that are resumed after that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import CheckpointError, PlanError
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.plain_loops import assert_equal_weights, difference_of_resumed, fitted, plain_loop
from tests.support.programs import a_task, advance, last_state, through_file


class Made:
    """The model and the optimizer of a Task that were made last, as a user's file has them in globals."""

    model: nn.Module
    optimizer: Optimizer


Change = Callable[[Made], None]


def thaw(made: Made) -> None:
    made.model[0].requires_grad_(True)


def thaw_and_add(made: Made) -> None:
    made.model[0].requires_grad_(True)
    made.optimizer.add_param_group({"params": list(made.model[0].parameters()), "lr": 0.02})


def append(made: Made) -> None:
    made.model[0].requires_grad_(True)
    made.optimizer.param_groups[0]["params"].extend(made.model[0].parameters())


def freeze_the_last(made: Made) -> None:
    made.model[2].weight.requires_grad_(False)


CHANGES: dict[str, tuple[bool, Change]] = {
    "thawed, and in the optimizer before": (True, thaw),
    "thawed and added to the optimizer": (False, thaw_and_add),
    "thawed and appended to a group": (False, append),
    "thawed, and in no optimizer": (False, thaw),
    "frozen": (True, freeze_the_last),
}
"""Whether the optimizer has all parameters from the beginning, and what the callback does after the first epoch."""


def make(name: str, optimizer: Callable[..., Optimizer] = torch.optim.Adam, **fields: Any) -> hotloop.Task:
    all_parameters, change = CHANGES[name]
    made = Made()

    def model() -> nn.Module:
        made.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        made.model[0].requires_grad_(False)
        return made.model

    def build(parameters: Any) -> Optimizer:
        made.optimizer = optimizer(parameters.model.parameters() if all_parameters else parameters, lr=0.05)
        return made.optimizer

    def callback(view: hotloop.View) -> None:
        if view.event == "epoch" and view.epoch == 1:
            change(made)

    return a_task(model=model, optimizer=build, callbacks=[callback], epochs=5, **fields)


def reference(name: str, **fields: Any) -> nn.Module:
    def change(model: Any, optimizer: Any, epoch: int) -> None:
        if epoch == 0:
            made = Made()
            made.model, made.optimizer = model, optimizer
            CHANGES[name][1](made)

    return plain_loop(replace(make(name, **fields), callbacks=()), each_epoch=change)


@pytest.mark.few("frozen", "thawed, and in no optimizer")
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_resumed_after_it_is_the_plain_loops(tmp_path: Path, name: str) -> None:
    assert difference_of_resumed(lambda: make(name), tmp_path, epoch=3) == []
    model = hotloop.load_model(Run.open(tmp_path / "parts"), task=make(name), weights="last")
    assert_equal_weights(model, reference(name))


@pytest.mark.more
@pytest.mark.few(
    "{'optimizer': 'fused'}-thawed and added to the optimizer",
    "{'optimizer': 'foreach'}-thawed, and in the optimizer before",
)
@pytest.mark.parametrize("name", ["thawed, and in the optimizer before", "thawed and added to the optimizer"])
@pytest.mark.parametrize("axes", [{"accumulation": 2}, {"optimizer": "fused"}, {"optimizer": "foreach"}], ids=str)
def test_plans_resume_after_it_too(tmp_path: Path, name: str, axes: dict[str, Any]) -> None:
    plan = Plan(**axes)
    assert difference_of_resumed(lambda: make(name, torch.optim.SGD), tmp_path, epoch=3, plan=plan) == []
    parameters = last_state(Run.open(tmp_path / "parts")).parameters
    for value, expected in zip(
        parameters.values(), reference(name, optimizer=torch.optim.SGD).parameters(), strict=True
    ):
        torch.testing.assert_close(value, expected)


@pytest.mark.more
def test_a_compiled_step_that_is_resumed_trains_what_was_thawed(tmp_path: Path) -> None:
    name, options = "thawed, and in the optimizer before", {"plan": Plan(compile="step")}
    assert difference_of_resumed(lambda: make(name), tmp_path, epoch=3, **options) == []
    parameters = last_state(Run.open(tmp_path / "parts")).parameters
    for value, expected in zip(parameters.values(), reference(name).parameters(), strict=True):
        torch.testing.assert_close(value, expected)


def test_the_state_has_what_is_trainable_and_goes_through_a_file() -> None:
    task = make("thawed, and in the optimizer before")
    program = hotloop.lower(task)
    assert program.state().trainable == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}
    program.model[0].requires_grad_(True)  # type: ignore[index]
    other = hotloop.lower(task)
    other.restore(through_file(program.state()))
    assert all(value.requires_grad for value in other.model.parameters())


def test_saved_parameters_of_another_optimizer_are_still_refused() -> None:
    saved = hotloop.lower(make("thawed, and in no optimizer")).state()
    with pytest.raises(CheckpointError, match="another optimizer"):
        hotloop.lower(make("frozen")).restore(saved)  # which has all parameters from the beginning


def test_going_back_within_a_process_freezes_again() -> None:
    program = hotloop.lower(make("thawed, and in the optimizer before"))
    start = program.state()
    advance(program, 2)
    program.model[0].requires_grad_(True)  # type: ignore[index]
    program.restore(start)
    assert differing_paths(program.state(), start) == []


def test_a_forgotten_thaw_would_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that `trainable` in State guards against."""
    capture = hotloop.lowering.program.capture_model
    monkeypatch.setattr(
        hotloop.lowering.program, "capture_model", lambda model, **how: capture(model, **how) | {"trainable": {}}
    )
    assert difference_of_resumed(lambda: make("thawed, and in the optimizer before"), tmp_path, epoch=3) != []


def test_ranks_refuse_it_in_one_line() -> None:
    program = hotloop.lower(make("frozen"))
    step = program._step
    step.parts = replace(step.parts, plan=step.parts.plan.model_copy(update={"parallel": "data"}))
    step.invalidate_bindings()
    program.model[0].requires_grad_(True)  # type: ignore[index]
    with pytest.raises(PlanError, match=r"parallel=data, and '0.weight' was frozen or thawed after"):
        step.invalidate_bindings()


def test_a_run_without_changes_is_exact(tmp_path: Path) -> None:
    run = fitted(make("thawed, and in the optimizer before"), tmp_path / "run")
    assert run.record.facts.exact and run.record.facts.inexact == []
