"""Stopping and going on, as real processes: signals, the clock, a moved Task, a second process, a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hotloop.cli import build
from hotloop.training.run import Run
from tests.conftest import RunCli
from tests.support.processes.forked_server import Process, Server
from tests.support.processes.resumed_training import EVERYTHING, Training, disagreements, last_checkpoint, until

pytestmark = pytest.mark.slow

EPOCHS, EVERY = 12, 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Training:
    """A run that was never interrupted; a second process that wanted to join it was refused."""
    training = Training(tmp_path_factory.mktemp("whole") / "training", EPOCHS, EVERY, server=server)
    first = held_at(training, 20)
    second = training.begin()
    said, _ = second.communicate(timeout=300)
    training.release()
    first.communicate(timeout=300)
    assert first.returncode == 0
    assert second.returncode == 1
    assert "is being trained by another process" in said
    assert said.count("\n") == 1
    return training


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Training:
    """A run of a copy of the Task's file, stopped on the way; the copy is gone."""
    folder = tmp_path_factory.mktemp("stopped")
    task = Path(shutil.copy(EVERYTHING, folder / "mine.py"))
    training = Training(folder / "training", EPOCHS, EVERY, task=task, server=server)
    process = held_at(training, 25)
    process.terminate()
    training.release()
    process.communicate(timeout=300)
    assert process.returncode == 143
    task.unlink()
    return training


def copied(stopped: Training, folder: Path) -> Training:
    training = Training(folder / "training", EPOCHS, EVERY, server=stopped.server)
    shutil.copytree(stopped.run, training.run)
    return training


def held_at(training: Training, further: int, *options: str, **more: Any) -> Process:
    """A process that goes on, and waits within a step after so many further ones, until it is released."""
    steps = training.marks("steps") + further
    training.hold(steps)
    process = training.begin(*options, **more)
    assert until(process, lambda: training.marks("steps") > steps)
    return process


def to_group(training: Training, number: signal.Signals, *options: str, times: int = 1) -> tuple[int, str]:
    """Sends a signal to all processes of a training, as a terminal or a batch system does, once some steps are done."""
    process = held_at(training, 15, *options)
    family = psutil.Process(process.pid).children(recursive=True)
    for _ in range(times):
        os.killpg(process.pid, number)
    training.release()
    output, _ = process.communicate(timeout=300)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    return process.returncode, output


def document(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(process.stdout)  # type: ignore[no-any-return]


def test_stopped_in_every_way_with_workers_it_ends_bitwise_the_same(
    whole: Training, server: Server, tmp_path: Path, run_cli: RunCli
) -> None:
    training = Training(tmp_path / "training", EPOCHS, EVERY, workers=2, server=server)
    run = training.run

    code, said = to_group(training, signal.SIGTERM)
    assert (code, "stopped (SIGTERM) at step" in said, f"--resume {run}" in " ".join(said.split())) == (143, True, True)
    code, said = to_group(training, signal.SIGINT)
    assert (code, "stopped (SIGINT) at step" in said) == (130, True)
    saved = [event["step"] for event in Run.open(run).journal() if event["event"] == "stop"]
    assert last_checkpoint(Run.open(run)).state.position.step == saved[-1] > saved[0] > 0

    code, _ = to_group(training, signal.SIGINT, times=3)
    assert code == 130

    steps = training.marks("steps")
    training.hold(steps)
    stopped = training.begin("--stop-after", "0.2s", "--json", stderr=subprocess.PIPE)
    until(stopped, lambda: training.marks("steps") > steps)  # a slow machine ends before its first step
    time.sleep(0.3)
    training.release()
    said = json.loads(stopped.communicate(timeout=300)[0])
    assert (stopped.returncode, said["reason"], said["final"]) == (0, "stop-after", None)

    training.finish()
    assert training.problems == []
    assert [e["repeated_at_most"] for e in training.starts()[1:3]] == [0, 0]  # what was saved is not repeated
    assert all(e["repeated_at_most"] <= EVERY for e in training.starts()[1:])
    assert disagreements(whole.run, run) == []

    again = run_cli("train", "--resume", run, "--json")
    assert again.returncode == 0
    assert "is finished already" in again.stderr
    assert document(again)["final"] == Run.open(run).final
    assert len(document(again)["epochs"]) == EPOCHS

    longer = run_cli("train", "--resume", run, "--epochs", EPOCHS + 2, "--json")
    assert longer.returncode == 0
    assert f"the learning-rate schedule was made for {EPOCHS} epochs" in longer.stderr
    assert [row["epoch"] for row in document(longer)["epochs"]] == list(range(1, EPOCHS + 3))
    assert Run.open(run).final == document(longer)["final"]


@pytest.mark.more
def test_it_goes_on_though_the_original_file_was_changed(whole: Training, stopped: Training, tmp_path: Path) -> None:
    """The tests of disks below go on though it is gone."""
    training = copied(stopped, tmp_path)
    original = stopped.folder.parent / "mine.py"
    original.write_text("raise SystemExit('the changed file ran')")
    training.finish(fresh=False)
    original.unlink()
    assert training.problems == []
    assert disagreements(whole.run, training.run) == []


@pytest.mark.few("--seed-4")
@pytest.mark.parametrize(("option", "value"), [("--batch-size", 32), ("--seed", 4)])
def test_what_decides_the_order_of_the_data_stays(stopped: Training, tmp_path: Path, option: str, value: int) -> None:
    training = copied(stopped, tmp_path)
    before = (training.run / "run.json").read_bytes()
    result = CliRunner().invoke(build(), ["train", "--resume", str(training.run), option, str(value)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {option.strip('-').replace('-', '_')}={value} would change the order")
    assert result.stderr.count("\n") == 1
    assert (training.run / "run.json").read_bytes() == before


# ---------------------------------------------------------------- disks


def assert_full_disk(training: Training, code: int, output: str, before: int) -> None:
    """One line, exit code 1, and the last good checkpoint as it was."""
    lines = [line for line in output.splitlines() if "error" in line]
    assert code == 1, output
    assert "Traceback" not in output
    assert len(lines) == 1, output
    assert "can't be written" in lines[0]
    assert "free some space" in lines[0].lower()
    assert last_checkpoint(Run.open(training.run)).state.position.step >= before
    assert not list(training.run.rglob(".*.part"))


@pytest.mark.more
def test_a_limit_on_the_size_of_files_loses_nothing(whole: Training, stopped: Training, tmp_path: Path) -> None:
    training = copied(stopped, tmp_path)
    (newest, *_) = Run.open(training.run).checkpoints.files()
    limit = newest.stat().st_size - 1
    before = newest.read_bytes()
    process = training.begin(file_bytes=limit)
    output, _ = process.communicate(timeout=300)
    assert_full_disk(training, process.returncode, output, last_checkpoint(Run.open(stopped.run)).state.position.step)
    assert newest.read_bytes() == before
    training.finish(fresh=False)
    assert training.problems == []
    assert disagreements(whole.run, training.run) == []


@contextmanager
def mounted(folder: Path, *command: str) -> Iterator[None]:
    """What only root may do; skips where it may not either."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    done = subprocess.run(["mount", *command, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine can't mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing(whole: Training, stopped: Training, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=24m", "tmpfs"):
        training = copied(stopped, disk)
        filler = disk / "filler"
        fill(filler, leave_bytes=12_000)
        process = training.begin()
        output, _ = process.communicate(timeout=300)
        at = last_checkpoint(Run.open(stopped.run)).state.position.step
        assert_full_disk(training, process.returncode, output, at)
        filler.unlink()
        training.finish(fresh=False)
        assert training.problems == []
        assert disagreements(whole.run, training.run) == []


def fill(path: Path, leave_bytes: int) -> None:
    """Writes until the disk is full, then gives a little back."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(0, file.tell() - leave_bytes))


@pytest.mark.more
def test_without_permission_to_write_it_is_one_line(stopped: Training, tmp_path: Path, run_cli: RunCli) -> None:
    training = copied(stopped, tmp_path)
    folder = training.folder
    with read_only(folder):
        for arguments in (["--resume", training.run], [EVERYTHING, "--run", folder / "new"]):
            process = run_cli("train", *arguments)
            assert process.returncode == 1
            assert process.stderr.splitlines()[-1].startswith("error: no permission to write")
            assert "Traceback" not in process.stderr


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
    else:  # whom permission bits don't bind
        with mounted(folder, "--bind", "-o", "ro", str(folder)):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
            yield
