"""Each step and each event of a callback happens once, whatever a step draws and whatever is tried before training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop.errors import NonFiniteError
from hotloop.plan import Plan
from tests.support.killed_training import Killed, at_step, events, kill
from tests.support.plain_loops import fitted
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task, labelled, last_state

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "python": random.random,
    "python's gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy's normal": lambda: float(np.random.standard_normal()),
    "both": lambda: random.random() + float(np.random.randn()),
}


class Step:
    """Counts its calls by batch and mode, and draws from one step on."""

    def __init__(self, draw: str, first: int, every: int = 1) -> None:
        self.draw, self.first, self.every = DRAWS[draw], first, every
        self.calls: Counter[str] = Counter()

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        number = self.calls["training" if model.training else "evaluation"]
        self.calls["training" if model.training else "evaluation"] += 1
        if model.training and number >= self.first and (number - self.first) % self.every == 0:
            x = x * (1 + 0.1 * self.draw())
        return F.cross_entropy(model(x), y)


class Seeing:
    """Counts a run's events."""

    def __init__(self) -> None:
        self.events: Counter[tuple[str, int]] = Counter()

    def __call__(self, view: hotloop.View) -> None:
        if view.event != "progress":
            self.events[view.event, view.epoch] += 1


def make(draw: str, first: int, every: int = 1, **fields: Any) -> tuple[Step, hotloop.Task]:
    step = Step(draw, first, every)
    return step, a_task(step=step, epochs=12, **fields)


@pytest.mark.few("baseline-0-nothing", "baseline-0-both", "baseline-20-python", "baseline-20-numpy's normal")
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("first", [0, 20])
@pytest.mark.parametrize(
    "plan", ["baseline", *(pytest.param(plan, marks=pytest.mark.more) for plan in ("auto", "stream"))]
)
def test_each_step_is_called_once_and_each_event_is_seen_once(tmp_path: Path, draw: str, first: int, plan: str) -> None:
    seeing = Seeing()
    step, task = make(draw, first, validation=labelled(8), callbacks=[seeing])
    options: dict[str, Any] = {"plan": Plan(residency="stream") if plan == "stream" else plan}
    run = fitted(task, tmp_path / "run", checkpoint_every="7", **options)
    assert step.calls == {"training": run.epochs[-1]["step"], "evaluation": 24}
    epochs = {event: count for event, count in seeing.events.items() if event[0] in ("start", "epoch", "stop")}
    assert set(epochs.values()) == {1} and len(epochs) == 14
    assert events(tmp_path / "run", "resume") == []


@pytest.mark.few("20-7-33-both")
@pytest.mark.parametrize("draw", ["python", "numpy", "both"])
@pytest.mark.parametrize(("first", "every", "until"), [(0, 1, 17), (20, 1, 17), (20, 1, 21), (20, 7, 33), (20, 40, 30)])
def test_a_killed_run_draws_the_same(tmp_path: Path, draw: str, first: int, every: int, until: int) -> None:
    fitted(make(draw, first, every)[1], tmp_path / "whole", checkpoint_every="10")
    with pytest.raises(Killed):
        fitted(make(draw, first, every)[1], tmp_path / "run", checkpoint_every="10", callbacks=[at_step(until, kill)])
    fitted(make(draw, first, every)[1], tmp_path / "run", resume=True)
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []


def test_where_the_data_lie_makes_no_other_draws(tmp_path: Path) -> None:
    """Samples that are loaded one by one reseed the generators between steps."""
    x, y = labelled()
    samples = list(zip(x, y, strict=True))
    states = []
    for data, residency in (((x, y), "stream"), (samples, "stream"), (samples, "host")):
        _, task = make("both", 20, 3, data=data)
        run = fitted(task, tmp_path / f"{residency}{len(states)}", plan=Plan(residency=residency))
        states.append(last_state(run).parameters["weight"])
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_a_callback_that_draws_changes_nothing_in_the_steps(tmp_path: Path) -> None:
    def draws(view: hotloop.View) -> None:
        random.random()
        np.random.rand()

    fitted(make("both", 20)[1], tmp_path / "one")
    fitted(make("both", 20, callbacks=[draws])[1], tmp_path / "other", checkpoint_every="3")
    assert disagreements(tmp_path / "one", tmp_path / "other") == []


def test_successive_steps_draw_different_numbers(tmp_path: Path) -> None:
    seen: list[float] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(random.random())
        return F.cross_entropy(model(batch[0]), batch[1])

    program = hotloop.lower(a_task(step=step))
    program.advance(5)
    assert len(set(seen)) == 5


def test_only_a_replay_after_nan_calls_steps_again_and_says_so(tmp_path: Path) -> None:
    class Nan(Step):
        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            loss = super().__call__(model, batch)
            return loss * float("nan") if self.calls["training"] >= 30 else loss

    step = Nan("numpy", 20)
    with pytest.raises(NonFiniteError, match="step 30"):
        fitted(a_task(step=step, epochs=12), tmp_path / "run", checkpoint_every="8")


@pytest.mark.parametrize("axes", [{"accumulation": 2}, {"residency": "host"}, {"optimizer": "foreach"}], ids=str)
def test_what_a_plan_tries_before_training_leaves_counters_as_they_were(tmp_path: Path, axes: dict[str, Any]) -> None:
    pieces = axes.get("accumulation", 1)
    step, task = make("nothing", 0)
    run = fitted(task, tmp_path / "run", plan=Plan(**axes))
    assert step.calls["training"] == run.epochs[-1]["step"] * pieces
