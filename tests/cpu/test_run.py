"""A run that is stopped or killed anywhere, and then gone on with, ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import CheckpointError, RunError
from hotloop.lowering import Program
from hotloop.plan import Plan
from hotloop.run import Run
from hotloop.state import Position, State
from tests.cpu.killing import EPOCHS, EVERY, KILLED_AT, Killed, at_step, events, train
from tests.cpu.programs import a_task, trained
from tests.everything import STEPS_PER_EPOCH, CentredLoss, task
from tests.resuming import disagreements


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(path)
    return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the second epoch, and awaits going on."""
    path = tmp_path_factory.mktemp("killed") / "run"
    train(path, until=KILLED_AT)
    return path


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    """A copy of that run, to go on with."""
    return Path(shutil.copytree(killed, tmp_path / "run"))


# ---------------------------------------------------------------- killed and gone on with


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


def test_killed_again_and_again_it_ends_bitwise_the_same(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    for step in (2, 3, 9, 9, 17, 30, 39):
        assert train(path, until=step) is None
    train(path)
    assert disagreements(whole, path) == []
    assert all(event["repeated_at_most"] <= EVERY for event in events(path, "resume"))


@pytest.mark.parametrize("workers", [0, 1])
def test_neither_workers_nor_a_change_of_them_change_anything(tmp_path: Path, workers: int) -> None:
    whole, path = tmp_path / "whole", tmp_path / "run"
    train(whole, plan=Plan())
    train(path, until=KILLED_AT, plan=Plan(workers=workers))
    train(path, plan=Plan(workers=1 - workers))
    assert disagreements(whole, path) == []


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


def test_killed_in_an_evaluation_and_in_the_last_one(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    test_batches = 4 * 3 + 1  # three validations of 40 samples in batches of 16, then the first batch of the test

    class Loss(type(task().loss)):  # type: ignore[misc]
        left = 2

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                Loss.left -= 1
                if Loss.left == 0:
                    raise Killed
            return super().forward(output, target)

    mortal = replace(task(EPOCHS), loss=Loss(""))
    assert train(path, mortal) is None  # in the second batch of the first evaluation
    assert not Run.open(path).epochs
    Loss.left = test_batches - 3
    assert train(path, mortal) is None  # in the test's first batch or soon after
    Loss.left = -1
    train(path, mortal)
    assert [event["step"] for event in events(path, "resume")][-1] > STEPS_PER_EPOCH
    assert disagreements(whole, path) == []


class Unrepeatable(torch.utils.data.IterableDataset):
    """A stream that shuffles and draws by the global generators while it runs."""

    def __iter__(self) -> Any:
        for index in torch.randperm(37).tolist():
            yield torch.randn(6) + random.random() + float(np.random.random()), index % 3


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


def test_an_optimizer_with_closures_resumes_bitwise(tmp_path: Path) -> None:
    def closed() -> hotloop.Task:
        model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))  # noqa: E731
        return a_task(model=model, optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4), epochs=3, average=0.5)

    train(tmp_path / "whole", closed())
    train(tmp_path / "run", closed(), until=8)
    train(tmp_path / "run", closed())
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []


# ---------------------------------------------------------------- stopped


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
        if not torch.is_grad_enabled():
            self.evaluated += 1
            if self.evaluated == self.at:
                signal.raise_signal(signal.SIGINT)
        return super().forward(output, target)


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


def test_more_epochs_go_on_with_a_finished_run(tmp_path: Path) -> None:
    def longer(epochs: int) -> hotloop.Task:
        return replace(task(epochs), schedule=None)

    train(tmp_path / "whole", longer(4))
    train(tmp_path / "run", longer(2))
    train(tmp_path / "run", longer(4), until=30)
    train(tmp_path / "run", longer(4))
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []


# ---------------------------------------------------------------- of another Task


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": lambda: nn.Linear(12, 4)}, "the checkpoint is of another model"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}, "another optimizer"),
        ({"schedule": None}, "another learning-rate schedule"),
        ({"average": None}, "averaged parameter"),
        ({"loss": nn.CrossEntropyLoss()}, "buffer of the loss"),
        ({"batch_size": 32}, "203 samples in batches of 32; expected 203 in batches of 16"),
        ({"validation": 50}, "193 samples in batches of 16; expected 203"),
    ],
)
def test_another_task_is_one_clear_line_and_the_run_stays(copy: Path, change: dict[str, Any], said: str) -> None:
    before = contents(copy)
    with pytest.raises((CheckpointError, RunError), match=said) as caught:
        train(copy, replace(task(EPOCHS), **change))
    assert "\n" not in str(caught.value)
    assert contents(copy) == before


def test_another_version_of_torch_is_told(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy / "run.json"
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    train(copy, progress=True)
    said = " ".join(capfd.readouterr().err.split())
    assert f"torch 1.0 then, {torch.__version__} now: the result may differ in its last bits" in said


# ---------------------------------------------------------------- the folder


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="doesn't exist"):
        hotloop.fit(task(), run=tmp_path / "none", resume=True, progress=False)
    with pytest.raises(RunError, match="is not a run"):
        hotloop.fit(task(), run=tmp_path, resume=True, progress=False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="exists and is not a run"):
        hotloop.fit(task(), run=tmp_path, progress=False)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_is_not_started_over(whole: Path) -> None:
    with pytest.raises(RunError, match="holds a run already"):
        hotloop.fit(task(), run=whole, progress=False)


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_run_killed_while_it_was_made_is_made_again(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the files that make a run may be the last one written."""
    path = tmp_path / "run"
    written = []
    write = Path.replace

    def mortal(self: Path, target: Path) -> Path:
        written.append(target.name)
        if len(written) >= kept:
            raise Killed
        return write(self, target)

    record, files = Run.open(train_once(tmp_path / "other")).record, {"a.py": b"one = 1", "b.py": b"two = 2"}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", mortal)
        with pytest.raises(Killed):
            Run.create(path, record, Plan(), files)
    assert not (path / "run.json").exists()
    Run.create(path, record, Plan(), {"a.py": b"other = 1"})
    assert {file.name for file in (path / "source").iterdir()} == {"a.py"}
    assert Run.open(path).record == record
    with pytest.raises(RunError, match="holds a run already"):
        Run.create(path, record, Plan(), files)


def train_once(path: Path) -> Path:
    train(path, a_task())
    return path


def test_two_at_once_are_refused(copy: Path) -> None:
    first = Run.open(copy)
    first.lock()
    with pytest.raises(RunError, match="is being trained by another process"):
        train(copy)
    first.unlock()
    train(copy)


def test_a_worker_that_was_just_being_started_when_its_training_was_killed_lets_go(copy: Path) -> None:
    """It has the lock from its parent, until it runs and closes it."""
    import fcntl

    began = "import os, sys, time; print(flush=True); time.sleep(0.5); os.close(int(sys.argv[1]))"
    first = Run.open(copy)
    first.lock()
    held = os.open(copy / ".lock", os.O_RDWR)
    first.unlock()
    fcntl.flock(held, fcntl.LOCK_EX)
    worker = subprocess.Popen(
        [sys.executable, "-c", f"{began}; time.sleep(60)", str(held)], pass_fds=[held], stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        os.close(held)
        train(copy)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.communicate()


def test_what_another_process_ends_meanwhile_is_not_gone_on_with_as_it_was_before(copy: Path) -> None:
    first, later = Run.open(copy), Run.open(copy)
    first.lock()
    with ThreadPoolExecutor(1) as waiting:
        locked = waiting.submit(later.lock)
        time.sleep(0.3)
        assert not locked.done()
        first.log("stop")
        first.unlock()
        with pytest.raises(RunError, match="is being trained by another process"):
            locked.result()
    Run.open(copy).lock()


def test_the_journal_survives_a_torn_line(whole: Path, copy: Path) -> None:
    with (copy / "journal.jsonl").open("a") as file:
        file.write('{"event": "checkpo')
    train(copy)
    lines = (copy / "journal.jsonl").read_text().splitlines()
    torn = [line for line in lines if not line.endswith("}")]
    assert torn == ['{"event": "checkpo']
    assert [event["event"] for event in Run.open(copy).journal()][-1] == "final"
    assert disagreements(whole, copy) == []


def test_metrics_torn_by_a_kill_are_written_anew(whole: Path, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    train(copy)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert disagreements(whole, copy) == []


@pytest.mark.parametrize("marked", [0, 7, 123456789])
def test_what_was_reached_is_read_back(copy: Path, marked: int) -> None:
    run = Run.open(copy)
    run.mark(10**9)
    run.mark(marked)
    assert run.reached() == marked
    (copy / "reached").write_text("")
    assert run.reached() == 0
    (copy / "reached").unlink()
    assert run.reached() == 0
    run = Run.open(copy)
    run.mark(marked)
    assert run.reached() == marked


def test_a_position_is_where_training_goes_on(copy: Path) -> None:
    found = Run.open(copy).checkpoints.newest()
    assert found is not None
    assert found[0].state.position == Position(step=20, epoch=1, batch=20 - STEPS_PER_EPOCH)


def test_one_process_asks_for_its_state_for_checkpoints_alone_and_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, state = list[tuple[int, bool]](), Program.state

    def counted(program: Program, *, lent: bool = False) -> State:
        asked.append((program.position.step, lent))
        return state(program, lent=lent)

    monkeypatch.setattr(Program, "state", counted)
    run = trained(a_task(epochs=2), tmp_path / "run", checkpoint_every="10h")
    assert asked == [(event["step"], True) for event in run.journal() if event["event"] == "checkpoint"] == [(10, True)]
