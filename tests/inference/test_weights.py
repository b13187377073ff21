"""Which weights of a trained network are put to use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import CheckpointError, RunError, TaskError
from tests.support.programs import a_task, labelled, last_state, trained


def worse_and_worse(**fields: Any) -> hotloop.Task:
    """Validation loss falls, and the Task takes the highest for the best: that of the first epoch."""
    x, y = labelled(40)
    task = dict(data=(x, y), validation=(x, y), monitor="validation_loss", goal="max", epochs=3)
    return a_task(**task | fields)


def test_best_is_the_best_epochs_and_last_the_last(tmp_path) -> None:
    run = trained(worse_and_worse(), tmp_path / "run")
    best, last = hotloop.load_model(run), hotloop.load_model(run, weights="last")
    losses = [epoch["validation_loss"] for epoch in run.epochs]
    assert losses[0] > losses[-1]
    assert hotloop.evaluate(run, on="validation").loss == losses[0]
    assert hotloop.evaluate(run, on="validation", weights="last").loss == losses[-1]
    assert not torch.equal(best.weight, last.weight)
    assert torch.equal(last.weight, last_state(run).parameters["weight"])
    found = hotloop.evaluate(run, on="validation")
    assert (found.weights, found.epoch) == ("best", 1)


def test_without_validation_best_means_the_last_as_in_the_final_figures(tmp_path) -> None:
    x, y = labelled(40)
    run = trained(a_task(data=(x, y), test=(x, y), monitor="train_loss", goal="max", epochs=2), tmp_path / "run")
    found = hotloop.evaluate(run)
    assert (found.weights, found.epoch) == (run.final["weights"], run.final["epoch"]) == ("last", 2)
    assert found.loss == run.final["test_loss"]


@pytest.mark.parametrize("weights", ["best", "last"])
def test_averaged_weights_take_the_place_of_the_parameters(tmp_path, weights) -> None:
    run = trained(worse_and_worse(average=0.9), tmp_path / "run")
    state = last_state(run)
    if weights == "best":
        state = run.checkpoints.load_best(run.checkpoints.newest()[0].best).state
    model = hotloop.load_model(run, weights=weights)
    assert torch.equal(model.weight, state.average["weight"])
    assert not torch.equal(model.weight, state.parameters["weight"])


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(tmp_path) -> None:
    run = trained(worse_and_worse(), tmp_path / "run", checkpoint_every="5")
    newest = run.checkpoints.files()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    said: list[str] = []
    hotloop.load_model(run, weights="last", say=said.append)
    assert len(said) == 1 and newest.name in said[0]
    with pytest.warns(UserWarning, match=newest.name):
        hotloop.load_model(run)


def test_a_run_without_a_checkpoint(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    for file in run.checkpoints.files():
        file.unlink()
    with pytest.raises(RunError, match=r"lost all its checkpoints.*nothing in this folder"):
        hotloop.predict(run, labelled()[0])


def test_no_weights_are_taken_for_the_best_when_those_are_gone(tmp_path) -> None:
    run = trained(worse_and_worse(), tmp_path / "run")
    for file in run.checkpoints.best_folder.iterdir():
        file.unlink()
    said: list[str] = []
    with pytest.raises(RunError, match="no good checkpoint for its best weights"):
        hotloop.load_model(run, say=said.append)
    assert "can't be read" in said[0]
    hotloop.load_model(run, weights="last", say=said.append)


@pytest.mark.parametrize("path", ["", "nowhere"])
def test_a_folder_that_is_no_run(tmp_path, path) -> None:
    with pytest.raises(RunError):
        hotloop.load_model(tmp_path / path)


def test_another_task_is_refused(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another model.*'weight'"):
        hotloop.load_model(run, task=a_task(model=lambda: nn.Linear(6, 4)))


def test_a_run_from_python_is_opened_again_with_its_task(tmp_path) -> None:
    task = a_task()
    first = hotloop.predict(trained(task, tmp_path / "run"), labelled()[0])
    with pytest.raises(TaskError, match="trained from Python"):
        hotloop.predict(tmp_path / "run", labelled()[0])
    assert np.array_equal(hotloop.predict(tmp_path / "run", labelled()[0], task=task), first)
