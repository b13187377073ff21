"""A lowered Task does what a plain PyTorch loop does, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.random.rng import RandomStreams
from hotloop.core.state import State, differing_paths
from hotloop.errors import TaskError
from tests.support.programs import a_task, advance, labelled, last_state, state_after, through_file, trained
from tests.support.tasks.random_network import Drawing, network


def assert_same_bits(model: nn.Module, state: State) -> None:
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = state.parameters | state.buffers
    assert values.keys() == expected.keys()
    assert [name for name, value in values.items() if not value.equal(expected[name])] == []


# --- a loop of one's own ------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "groups": lambda parameters: torch.optim.RMSprop(
        [{"params": list(parameters)[:2], "lr": 0.01}, {"params": list(parameters)[2:], "lr": 0.001}]
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_on_batches_of_the_callers_are_those_of_a_plain_loop(optimizer: str) -> None:
    task = a_task(model=network, optimizer=OPTIMIZERS[optimizer])
    program = hotloop.lower(task)

    model = network()
    model.load_state_dict(program.model.state_dict())
    plain = OPTIMIZERS[optimizer](list(model.parameters()))
    x, y = labelled()
    model.train()
    for start in range(0, 20, 4):
        batch = x[start : start + 4], y[start : start + 4]
        loss = program.step(batch)
        plain.zero_grad()
        expected = nn.functional.cross_entropy(model(batch[0]), batch[1])
        expected.backward()
        plain.step()
        assert loss.shape == () and not loss.requires_grad
        assert loss.equal(expected.detach())
    assert_same_bits(model, program.state())
    for name, value in model.named_parameters():
        saved = program.state().optimizer["state"][name]
        kept = {key: item for key, item in plain.state[value].items() if item is not None}
        assert all(item.equal(saved[key]) for key, item in kept.items())


def test_steps_of_ones_own_can_be_stopped_and_gone_on_with() -> None:
    x, y = labelled()
    task = a_task(model=lambda: network(0.5), optimizer=OPTIMIZERS["adamw"], average=0.9)
    whole, first, second = (hotloop.lower(task) for _ in range(3))
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4)]
    for batch in batches:
        whole.step(batch)
    for batch in batches[:3]:
        first.step(batch)
    second.restore(through_file(first.state()))
    for batch in batches[3:]:
        second.step(batch)
    assert differing_paths(whole.state(), second.state()) == []


def test_the_end_of_an_epoch_is_told_by_the_caller() -> None:
    step_lr = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    program = hotloop.lower(a_task(schedule=step_lr, schedule_every="epoch"))
    program.step(labelled())
    assert program.read_sums()["samples"] == 24
    assert program.optimizer.param_groups[0]["lr"] == 0.1
    program.end_epoch()
    assert program.optimizer.param_groups[0]["lr"] == 0.05
    assert program.read_sums()["samples"] == 0
    assert (program.position.step, program.position.epoch, program.position.batch) == (1, 1, 0)


def test_a_plateau_schedule_wants_the_figure_that_it_watches() -> None:
    program = hotloop.lower(a_task(schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)))
    program.step(labelled())
    with pytest.raises(TaskError, match="without a figure"):
        program.end_epoch()


# --- the whole of fit ---------------------------------------------------------------------------------------


def plain_training(
    task: hotloop.Task, epochs: int, *, draws: bool = False
) -> tuple[nn.Module, dict[str, Tensor], list[float]]:
    """The loop of a textbook for a task made by `recipe`: the model, its averaged weights, the epochs' losses."""
    model = network(0.5 if draws else 0.0)
    model.load_state_dict(task.build_model().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=epochs * 5)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    x, y = labelled()
    losses, step = [], 0
    for epoch in range(epochs):
        assert task.roles.order is not None
        order = task.roles.order.epoch(epoch)
        total = torch.zeros((), dtype=torch.float64)
        for index in order.split(5):
            if draws:
                RandomStreams(task.seed).reseed("step", step, 0)
            model.train()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for name, value in model.named_parameters():
                    average[name].lerp_(value, 1 - 0.9)
            total += loss.detach().double() * len(index)
            step += 1
        losses.append(float(total) / len(x))
    return model, average, losses


def recipe(*, draws: bool = False, **fields: Any) -> hotloop.Task:
    return a_task(
        model=lambda: network(0.5 if draws else 0.0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total),
        clip_norm=0.5,
        clip_value=0.1,
        average=0.9,
        epochs=3,
        **fields,
    )


@pytest.mark.parametrize("draws", [False, True], ids=["no draws", "dropout"])
def test_fit_is_a_plain_loop(draws: bool, tmp_path: Path) -> None:
    task = recipe(draws=draws, seed=3)
    run = trained(task, tmp_path / "run")
    model, average, losses = plain_training(task, 3, draws=draws)
    state = last_state(run)
    assert_same_bits(model, state)
    assert [name for name, value in average.items() if not value.equal(state.average[name])] == []
    assert [row["train_loss"] for row in run.epochs] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("part", ["clip_norm", "clip_value", "schedule", "average"])
def test_the_comparison_with_a_plain_loop_sees_what_is_missing(part: str, tmp_path: Path) -> None:
    state = last_state(trained(replace(recipe(), **{part: None}), tmp_path / "run"))
    model, average, _ = plain_training(recipe(), 3)
    same = all(value.equal(state.parameters[name]) for name, value in model.named_parameters())
    if part == "average":
        assert average and not state.average
    else:
        assert not same


def test_an_interrupted_fit_ends_in_the_same_state(tmp_path: Path) -> None:
    task = recipe(draws=True, validation=6)
    whole = last_state(trained(task, tmp_path / "whole"))

    def stop(view: hotloop.View) -> None:
        if view.event == "checkpoint" and view.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(task, tmp_path / "broken", checkpoint_every="3", callbacks=[stop])
    run = trained(task, tmp_path / "broken", resume=True)
    assert [event["event"] for event in run.journal()].count("resume") == 1
    assert differing_paths(last_state(run), whole) == []


def test_the_model_is_built_from_the_seed_alone() -> None:
    starts = []
    for before in (1, 2):
        torch.manual_seed(before)
        random.seed(before)
        starts.append(state_after(a_task(model=network), 0))
    assert differing_paths(*starts) == []
    assert differing_paths(starts[0], state_after(a_task(model=network, seed=1), 0)) != []


def test_draws_differ_from_step_to_step_and_are_equal_in_two_runs() -> None:
    seen: list[Tensor] = []

    class Watched(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.detach() != 0)
            return out

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.ones_like(batch[0])).square().mean()

    task = a_task(model=lambda: nn.Sequential(Watched(0.5), nn.Linear(6, 3)), step=step, data=labelled(25))
    for _ in range(2):
        advance(hotloop.lower(task), 5)
    first, second = seen[:5], seen[5:]
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert not any(a.equal(b) for place, a in enumerate(first) for b in first[:place])


# --- the caller's random numbers ----------------------------------------------------------------------------


def _loop(task: hotloop.Task, path: Path) -> None:
    program = hotloop.lower(task)
    for _ in range(3):
        program.step(labelled())


@pytest.mark.parametrize("data", [labelled(), Drawing()], ids=["arrays", "drawing data set"])
@pytest.mark.parametrize(
    "use", [lambda task, path: hotloop.lower(task), _loop, trained], ids=["lower", "own loop", "fit"]
)
def test_the_callers_generators_are_left_alone(use: Callable, data: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    use(a_task(model=lambda: network(0.5), data=data, validation=4), tmp_path / "run")
    assert (torch.rand(()), random.random(), np.random.rand()) == expected
