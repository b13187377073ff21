"""A run that is stopped or killed anywhere, and then gone on with, ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.killed_training import EPOCHS, EVERY, KILLED_AT, Killed, at_step, events, train
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task
from tests.support.tasks.full_state_task import STEPS_PER_EPOCH, CentredLoss, task

# ---------------------------------------------------------------- killed and gone on with


@pytest.mark.few("1", "5", "13", "26")
@pytest.mark.parametrize("step", [1, 4, 5, 6, 12, 13, 14, 26, 38])
def test_killed_after_any_step_it_ends_bitwise_the_same(whole: Path, tmp_path: Path, step: int) -> None:
    path = tmp_path / "run"
    assert train(path, until=step) is None
    train(path)
    assert disagreements(whole, path) == []
    (resume,) = events(path, "resume")
    # A checkpoint that falls due is written after the step's callbacks: it is killed just before.
    last = (step - 1) // EVERY * EVERY
    assert (resume["step"], resume["repeated_at_most"]) == (last, step - last)


@pytest.mark.more
def test_killed_again_and_again_it_ends_bitwise_the_same(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    for step in (2, 3, 9, 9, 17, 30, 39):
        assert train(path, until=step) is None
    train(path)
    assert disagreements(whole, path) == []
    assert all(event["repeated_at_most"] <= EVERY for event in events(path, "resume"))


@pytest.mark.few("1")
@pytest.mark.parametrize("workers", [0, 1])
def test_neither_workers_nor_a_change_of_them_change_anything(tmp_path: Path, workers: int) -> None:
    whole, path = tmp_path / "whole", tmp_path / "run"
    train(whole, plan=Plan())
    train(path, until=KILLED_AT, plan=Plan(workers=workers))
    train(path, plan=Plan(workers=1 - workers))
    assert disagreements(whole, path) == []


@pytest.mark.more
@pytest.mark.few("7")
@pytest.mark.parametrize("every", ["1", "7", "1000", "0.0001s", "auto"])
def test_how_often_checkpoints_are_written_changes_nothing(whole: Path, tmp_path: Path, every: str) -> None:
    path = tmp_path / "run"
    train(path, until=KILLED_AT, checkpoint_every=every)
    train(path)
    assert disagreements(whole, path) == []
    (resume,) = events(path, "resume")
    assert resume["step"] == {"1": 21, "7": 21, "1000": 0, "0.0001s": 21, "auto": 0}[every]


def test_killed_while_a_checkpoint_is_written(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    replace_file = Path.replace

    def torn(self: Path, target: Path) -> Path:
        if "step-000000020" in self.name:
            self.write_bytes(self.read_bytes()[:1000])
            raise Killed
        return replace_file(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", torn)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process tidies nothing up
        assert train(path) is None
    assert list(path.rglob(".*.part"))
    train(path)
    assert events(path, "resume")[0]["step"] == 15
    assert not list(path.rglob(".*.part"))
    assert disagreements(whole, path) == []


@pytest.mark.more
def test_killed_in_an_evaluation_and_in_the_last_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    test_batches = 4 * 3 + 1  # three validations of 40 samples in batches of 16, then the first batch of the test

    class Loss(type(task().loss)):  # type: ignore[misc]
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if not self.training:
                monkeypatch.setenv("LEFT", str(int(os.environ["LEFT"]) - 1))  # no State holds the environment
                if os.environ["LEFT"] == "0":
                    raise Killed
            return super().forward(output, target)

    monkeypatch.setenv("LEFT", "2")
    mortal = replace(task(EPOCHS), loss=Loss(""))
    assert train(path, mortal) is None  # in the second batch of the first evaluation
    assert not Run.open(path).epochs
    monkeypatch.setenv("LEFT", str(test_batches - 3))
    assert train(path, mortal) is None  # in the test's first batch or soon after
    monkeypatch.setenv("LEFT", "-1")
    train(path, mortal)
    assert [event["step"] for event in events(path, "resume")][-1] > STEPS_PER_EPOCH
    assert disagreements(whole, path) == []


class Unrepeatable(torch.utils.data.IterableDataset):
    """A stream that shuffles and draws by the global generators while it runs."""

    def __iter__(self) -> Any:
        for index in torch.randperm(37).tolist():
            yield torch.randn(6) + random.random() + float(np.random.random()), index % 3


@pytest.mark.few("8")
@pytest.mark.parametrize("step", [3, 7, 8, 12])
def test_a_stream_resumes_bitwise_too_if_its_draws_are_the_global_generators(
    tmp_path: Path, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def streamed() -> hotloop.Task:
        return a_task(data=Unrepeatable(), epochs=3, model=lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 3)))

    train(tmp_path / "whole", streamed())
    train(tmp_path / "run", streamed(), until=step)
    train(tmp_path / "run", streamed(), progress=True)
    assert ("the data has an order of its own" in capfd.readouterr().err) == (step > EVERY)  # else it starts anew
    assert len(Run.open(tmp_path / "run").epochs) == 3
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.more
def test_an_optimizer_with_closures_resumes_bitwise(tmp_path: Path) -> None:
    def closed() -> hotloop.Task:
        model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))  # noqa: E731
        return a_task(model=model, optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4), epochs=3, average=0.5)

    train(tmp_path / "whole", closed())
    train(tmp_path / "run", closed(), until=8)
    train(tmp_path / "run", closed())
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []


# ---------------------------------------------------------------- stopped


@pytest.mark.few("SIGTERM")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_stops(whole: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "run"
    heard = at_step(KILLED_AT, lambda: signal.raise_signal(signal.Signals[name]))
    train(path, callbacks=[heard], checkpoint_every="auto")
    assert events(path, "stop")[-1] | {"time": 0} == {"event": "stop", "time": 0, "step": KILLED_AT, "reason": name}
    assert Run.open(path).final is None
    train(path)
    assert [event["repeated_at_most"] for event in events(path, "resume")] == [0]
    assert disagreements(whole, path) == []


class Signalling(CentredLoss):
    """Sends Ctrl-C to its own process in one batch of evaluation."""

    def __init__(self, at: int) -> None:
        super().__init__("")
        self.at, self.evaluated = at, 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.evaluated += 1
            if self.evaluated == self.at:
                signal.raise_signal(signal.SIGINT)
        return super().forward(output, target)


@pytest.mark.more
@pytest.mark.few("test")
@pytest.mark.parametrize(("at", "epochs_before"), [(5, 1), (11, 3)], ids=["validation", "test"])
def test_a_signal_is_heard_in_an_evaluation(whole: Path, tmp_path: Path, at: int, epochs_before: int) -> None:
    """Each validation takes three batches, the test four; none after the signal is waited for."""
    path = tmp_path / "run"
    run = train(path, replace(task(EPOCHS), loss=Signalling(at)))
    assert run is not None
    (stop,) = events(path, "stop")
    assert (stop["reason"], stop["step"]) == ("SIGINT", min(epochs_before + 1, EPOCHS) * STEPS_PER_EPOCH)
    assert (len(run.epochs), run.final) == (epochs_before, None)
    train(path)
    assert [event["repeated_at_most"] for event in events(path, "resume")] == [0]
    assert disagreements(whole, path) == []


def test_a_second_ctrl_c_interrupts_at_once(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(path, callbacks=[at_step(KILLED_AT, twice)])
    assert signal.getsignal(signal.SIGINT) is before
    train(path)
    assert events(path, "resume")[0]["step"] == 20
    assert disagreements(whole, path) == []


def test_stop_after_saves_and_stops(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, stop_after="0.000001s", checkpoint_every="auto")
    assert events(path, "stop")[-1]["reason"] == "stop-after"
    train(path)
    assert disagreements(whole, path) == []


def test_a_finished_run_is_left_as_it_is(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    again = train(whole)
    assert again is not None and again.final is not None
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


@pytest.mark.more
def test_more_epochs_go_on_with_a_finished_run(tmp_path: Path) -> None:
    def longer(epochs: int) -> hotloop.Task:
        return replace(task(epochs), schedule=None)

    train(tmp_path / "whole", longer(4))
    train(tmp_path / "run", longer(2))
    train(tmp_path / "run", longer(4), until=30)
    train(tmp_path / "run", longer(4))
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []
