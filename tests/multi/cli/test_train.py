"""`hotloop train --ranks`, as a person types it: fresh processes, signals to the command, other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import hotloop
from hotloop.cli.options import is_data_parallel_default
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.conftest import RunCli
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.forked_server import Server
from tests.support.processes.resumed_training import disagreements, last_checkpoint
from tests.support.tasks.rank_tasks import images

FILE = """
import time

import torch
from torch import nn

import hotloop

x = torch.randn(92, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def task(epochs: int = 4, pause: float = 0.0):
    def loss(output, target):
        time.sleep(pause)
        return nn.functional.cross_entropy(output, target)

    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(),
        loss=loss,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        data=(x, x[:, :3].argmax(1)),
        validation=0.1,
        batch_size=20,
        epochs=epochs,
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(FILE)
    return path


@pytest.mark.more
def test_ranks_stop_on_a_signal_and_one_process_goes_on(
    file: Path, server: Server, run_cli: RunCli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = server.start("train", file, "--ranks", "2", "--run", run, "--json", "-p", "pause=0.1", cwd=tmp_path)
    while Run.open(run).reached() < 2 if (run / "run.json").exists() else process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert err.count("stopped (SIGTERM)") == 1
    assert json.loads(out)["reason"] == "SIGTERM"
    assert psutil.Process(process.pid).children() == [] if psutil.pid_exists(process.pid) else True
    stopped = last_checkpoint(Run.open(run)).state.position
    assert 0 < stopped.step < 20

    # One process goes on with what two have left, and ends where one process alone comes to.
    last = run_cli("train", "--resume", run, "--set", "parallel=none")
    assert last.returncode == 0, last.stderr
    assert [event["step"] for event in Run.open(run).journal() if event["event"] == "resume"] == [stopped.step]
    alone = tmp_path / "alone"
    assert run_cli("train", file, "--plan", "baseline", "--run", alone).returncode == 0
    assert nearly(run, alone)
    assert disagreements(run, alone) != []  # bits do differ: nothing above compared a run with itself


def nearly(one: Path, other: Path) -> bool:
    a, b = (last_checkpoint(Run.open(path)).state for path in (one, other))
    far = [float((a.parameters[name] - b.parameters[name]).abs().max()) for name in b.parameters]
    return a.position == b.position and max(far) < 1e-10


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--set", "parallel=data"), "parallel=data on the CPU without a number of ranks; expected how many"),
        (("--ranks", "0"), "ranks=0 in the plan; expected 1 or more"),
        (("--set", "ranks=2"), "ranks=2 with parallel=none can't be run here"),
        (("--ranks", "100000"), "of memory free; expected at most"),
    ],
)
def test_what_can_be_known_at_once_is_said_before_ranks_are_started(
    file: Path, run_cli: RunCli, options: tuple[str, ...], says: str
) -> None:
    done = run_cli("train", file, *options)
    assert done.returncode == 1
    assert says in " ".join(done.stderr.split())
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.more
def test_an_error_that_all_ranks_have_is_told_once(file: Path, run_cli: RunCli) -> None:
    done = run_cli("train", file, "--ranks", "2", "--set", "accumulation=2", "--json")
    assert done.returncode == 1
    assert done.stderr.count("accumulation=2 with parallel=data can't be run here") == 1
    assert json.loads(done.stdout)["error"]["kind"] == "PlanError"


def test_what_measures_one_process_refuses_ranks() -> None:
    with pytest.raises(PlanError, match="parallel=data in a single process"):
        hotloop.lower(images(torch.float32), Plan(parallel="data", ranks=2))


@pytest.mark.more
def test_ranks_that_torchrun_started_share_each_batch_without_a_word(file: Path, tmp_path: Path) -> None:
    asked = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "hotloop", "train"]
    given = [str(file), "-p", "epochs=1", "--run", str(tmp_path / "run"), "--device", "cpu"]
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([sys.executable, *asked, *given], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert Run.open(tmp_path / "run").plan == Plan(parallel="data", ranks=2)


def test_what_torchrun_started_is_asked_for_as_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not is_data_parallel_default(None, Plan())
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        is_data_parallel_default(None, Plan())
        and not is_data_parallel_default(None, Plan(parallel="stages"))
        and not is_data_parallel_default(1, Plan())
    )
