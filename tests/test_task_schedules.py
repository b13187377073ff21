"""What a Task promises of learning rate schedules, against plain loops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import hotloop
from tests.support.programs import a_task, advance, assert_resumes, last_state, trained

SCHEDULES: dict[str, Callable] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=4),
    "LinearLR": lambda optimizer, total: lr_scheduler.LinearLR(optimizer, total_iters=total),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer, total: lr_scheduler.PolynomialLR(optimizer, total),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 3])],
        milestones=[2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,  # its second argument is the number of steps
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda optimizer, total: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.05),
}


def scheduled(name: str, every: str, **fields: Any) -> hotloop.Task:
    return a_task(
        schedule=SCHEDULES[name],
        schedule_every=every,
        epochs=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
        **fields,
    )


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_of_torch_resumes_exactly(name: str, every: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns of schedulers that step at the wrong time
        state = assert_resumes(scheduled(name, every), stop=7, steps=17)
    assert state.schedule["last_epoch" if "last_epoch" in state.schedule else "_last_lr"]


def test_no_schedule_of_torch_is_left_out() -> None:
    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert known - set(SCHEDULES) - {"LRScheduler", "_LRScheduler"} == set()


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"ReduceLROnPlateau"}))
def test_learning_rates_are_those_of_a_plain_loop(name: str, every: str) -> None:
    program = hotloop.lower(scheduled(name, every))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    total = 20 if every == "step" else 4
    takes_total = name in ("LinearLR", "PolynomialLR", "CosineAnnealingLR", "OneCycleLR")
    plain = SCHEDULES[name](optimizer, total) if takes_total else SCHEDULES[name](optimizer)
    for _ in range(4):
        for _ in range(5):
            assert program.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
            advance(program, 1)
            optimizer.step()
            if every == "step":
                plain.step()
        if every == "epoch":
            plain.step()


def test_a_schedule_that_names_the_total_gets_it_even_if_it_has_a_default() -> None:
    seen = []

    def schedule(optimizer: torch.optim.Optimizer, total: int = 100) -> Any:
        seen.append(total)
        return lr_scheduler.LinearLR(optimizer, total_iters=total)

    hotloop.lower(a_task(schedule=schedule, epochs=3))
    hotloop.lower(a_task(schedule=schedule, epochs=3, schedule_every="epoch"))
    assert seen == [15, 3]


def test_a_plateau_schedule_watches_the_monitored_figure(tmp_path: Path) -> None:
    figures = iter([3.0, 2.0, 2.5, 1.0, 1.5])

    class Told(nn.Module):
        """A metric that falls and rises as it was told."""

        def forward(self, output: Tensor, target: Tensor) -> float:
            return next(figures)

    task = a_task(
        schedule=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        validation=4,
        metrics={"told": Told()},
        monitor="validation_told",
        goal="min",
        epochs=5,
    )
    run = trained(task, tmp_path / "run")
    rates = [row["learning_rate"] for row in run.epochs]
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05]  # of the epoch itself; it halves after the third and the fifth
    assert last_state(run).optimizer["groups"][0]["lr"] == 0.025
