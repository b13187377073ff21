"""A run's folder: whose it is, who may write to it, and what is read back from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.state import Position, State
from hotloop.errors import CheckpointError, RunError
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.killed_training import EPOCHS, Killed, train
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task, trained
from tests.support.tasks.full_state_task import STEPS_PER_EPOCH, task

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
        ({"validation": 45}, "198 samples in batches of 16; expected 203"),
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


@pytest.mark.more
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
