"""What a Task promises of validation, stopping, the best epoch and callbacks."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import NonFiniteError, TaskError
from tests.support.programs import a_task, labelled, last_state, state_after, trained
from tests.support.tasks.layers_and_samples import AsSamples

# --- validation, stopping, the best epoch -------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(0.25, 6), (5, 5)])
def test_validation_is_split_off_by_seed(share: float, count: int) -> None:
    x = torch.arange(24)

    def parts(seed: int) -> tuple[Tensor, Tensor]:
        roles = a_task(data=(x.float()[:, None], x), validation=share, seed=seed, loss=nn.MSELoss()).roles
        return roles.train.columns[1], roles.validation.columns[1]

    train, held_out = parts(0)
    assert len(held_out) == count and torch.cat([train, held_out]).sort().values.equal(x)
    assert [a.equal(b) for a, b in zip(parts(0), parts(0), strict=True)] == [True, True]
    assert not parts(1)[1].equal(held_out)
    as_samples = a_task(data=AsSamples((x, x)), validation=share).roles.validation
    assert [as_samples.dataset[place][0].item() for place in range(count)] == held_out.tolist()


class Scripted(nn.Module):
    """A metric that says what it was told, evaluation by evaluation, and then keeps its last word."""

    def __init__(self, *figures: float) -> None:
        super().__init__()
        self.figures = list(figures)

    def forward(self, output: Tensor, target: Tensor) -> float:
        return self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]


def steered(figures: list[float], tmp_path: Path, **fields: Any) -> hotloop.Run:
    task = a_task(
        validation=4,
        metrics={"told": Scripted(*figures)},
        monitor="validation_told",
        goal="min",
        epochs=8,
        **fields,
    )
    return trained(task, tmp_path / "run")


def test_training_stops_when_patience_ends(tmp_path: Path) -> None:
    run = steered([5.0, 3.0, 4.0, 3.0, 2.0, 9.0, 9.0, 9.0], tmp_path, patience=2)
    assert len(run.epochs) == 4  # the second 3.0 is no progress
    assert run.final["epoch"] == 2 and run.final["weights"] == "best"
    assert "no better validation_told for 2 epochs" in run.final["reason"]


def test_training_stops_below_a_figure(tmp_path: Path) -> None:
    run = steered([5.0, 3.0, 2.0, 1.0], tmp_path, stop_below=2.5)
    assert len(run.epochs) == 3 and "validation_told reached 2" in run.final["reason"]


def test_rising_figures_are_better_where_the_goal_says_so(tmp_path: Path) -> None:
    task = a_task(
        validation=4,
        metrics={"score": Scripted(0.5, 0.9, 0.7, 0.6)},
        monitor="validation_score",
        epochs=8,
        patience=2,
    )
    run = trained(task, tmp_path / "run")  # the name has nothing of a loss: rising is better
    assert len(run.epochs) == 4 and run.final["epoch"] == 2
    run = steered([0.5, 0.9, 0.7], tmp_path / "falling", patience=1)
    assert len(run.epochs) == 2 and run.final["epoch"] == 1


def test_the_best_epochs_weights_are_kept_and_tested(tmp_path: Path) -> None:
    weights = []

    def note(view: hotloop.View) -> None:
        if view.event == "epoch":
            weights.append(view.step)

    test = labelled(40)
    run = steered([5.0, 3.0, 4.0, 6.0], tmp_path, callbacks=[note], patience=3, test=test)
    assert run.final["epoch"] == 2
    best = run.checkpoints.load_best(run.checkpoints.newest()[0].best).state
    expected = state_after(replace(run.task, metrics=None, monitor=None), 8)  # 20 samples, 4 batches an epoch
    assert all(value.equal(best.parameters[name]) for name, value in expected.parameters.items())
    model = nn.Linear(6, 3).requires_grad_(False)
    model.load_state_dict(best.parameters)
    assert run.final["test_loss"] == pytest.approx(float(F.cross_entropy(model(test[0]), test[1])), rel=1e-5)


def test_without_validation_the_last_weights_are_tested(tmp_path: Path) -> None:
    run = trained(a_task(epochs=2, test=labelled(40)), tmp_path / "run")
    model = nn.Linear(6, 3).requires_grad_(False)
    model.load_state_dict(last_state(run).parameters)
    x, y = labelled(40)
    assert run.final["weights"] == "last"
    assert not list(run.path.rglob("best/*"))  # which nobody would read
    assert run.final["test_loss"] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)


@pytest.mark.parametrize("name", ["validation_f1", "f1", "train_f1", "learning_rat"])
def test_an_unknown_figure_to_monitor_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"{name}.* is no figure of this Task.*validation_accuracy"):
        trained(a_task(validation=4, monitor=name), tmp_path / "run")


def test_a_figure_of_validation_needs_validation(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no validation data"):
        trained(a_task(monitor="validation_loss"), tmp_path / "run")


def test_a_figure_that_is_no_number_steers_nothing(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="told is NaN"):
        steered([3.0, math.nan, 2.0], tmp_path)


# --- callbacks ----------------------------------------------------------------------------------------------


def test_callbacks_see_what_happens_and_change_nothing(tmp_path: Path) -> None:
    seen: list[hotloop.View] = []

    def meddle(view: hotloop.View) -> None:
        seen.append(view)
        with pytest.raises(FrozenInstanceError):
            view.step = 0  # type: ignore[misc]
        assert isinstance(view.history, tuple)
        for record in view.history:
            with pytest.raises(Exception, match="frozen"):
                record.step = 0
            record.train["loss"] = -1.0  # what it has is a copy
            record.validation.clear()

    fields = dict(validation=4, epochs=3, patience=1)
    run = trained(a_task(**fields, callbacks=[meddle]), tmp_path / "run", callbacks=[meddle])
    plain = trained(a_task(**fields), tmp_path / "plain")
    figures = ("train_loss", "validation_loss", "learning_rate", "step")
    assert [[row[name] for name in figures] for row in run.epochs] == [
        [row[name] for name in figures] for row in plain.epochs
    ]
    assert differing_paths(last_state(run), last_state(plain)) == []
    events = [view.event for view in seen[::2]]
    assert events[0] == "start" and events[-2:] == ["stop", "final"] and events.count("epoch") == 3
    assert {"progress", "checkpoint"} & set(events)
    last = seen[-1]
    assert (last.epoch, last.epochs, last.step, last.batches) == (3, 3, 12, 4)


def test_a_callback_that_fails_is_named(tmp_path: Path) -> None:
    def broken(view: hotloop.View) -> None:
        raise ValueError("no such colour")

    with pytest.raises(TaskError, match=r"callback .*broken.* raised ValueError: no such colour"):
        trained(a_task(), tmp_path / "run", callbacks=[broken])
