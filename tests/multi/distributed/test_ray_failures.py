"""How trainings end whose Ray fails: a killed command, a worker that dies before its first batch, a full object store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotloop.training.run import Run, is_run
from tests.conftest import RunCli
from tests.support.processes.forked_server import Server
from tests.support.processes.process_tree import MARK, left_after, no_process_of_ray_is_left, processes_of  # noqa: F401 - a fixture
from tests.support.processes.resumed_training import until

pytestmark = pytest.mark.more

pytest.importorskip("ray", reason="needs hotloop[ray]")

FILE = """
import os, signal, time
from pathlib import Path

import torch
from torch import nn

import hotloop

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, place):
        time.sleep(0.01)
        return torch.full((6,), place / 80), torch.tensor([place / 80])

def model(width, dies):
    if dies and Path("/proc/self/cmdline").read_bytes().startswith(b"ray::") and not Path(dies).exists():
        Path(dies).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width // 8), nn.ReLU(), nn.Linear(width // 8, 1))

def task(width: int = 8, dies: str = ""):
    return hotloop.Task(model=lambda: model(width, dies), loss=nn.MSELoss(), data=Samples(), batch_size=8, epochs=3,
                        optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""

RAY = ("--ranks", "2", "--set", "workforce=ray")
ASYNC = (*RAY, "--set", "parallel=async")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("axes", [RAY, ASYNC], ids=["data", "async"])
def test_no_process_of_ray_is_left_where_the_command_is_killed(
    axes: tuple[str, ...], file: Path, server: Server, tmp_path: Path
) -> None:
    run, environment = tmp_path / "run", {**os.environ, MARK: str(tmp_path)}
    arguments = ("train", file, *axes, "--run", run, "--epochs", "1000")
    process = server.start(*arguments, cwd=tmp_path, env=environment)
    try:
        assert until(process, lambda: is_run(run) and Run.open(run).reached() > 2, pause_s=0.2)
        assert "raylet" in {one.name() for one in processes_of(str(tmp_path), tmp_path)}
    finally:
        process.kill()
    left, _ = left_after(30, str(tmp_path), tmp_path)
    names = [" ".join(one.cmdline())[:200] for one in left]
    for one in left:
        one.kill()
    assert names == []


def test_a_worker_that_dies_before_its_first_batch_is_started_again(
    file: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    done = run_cli("train", file, *ASYNC, "--run", tmp_path / "run", "-p", f"dies={tmp_path / 'died'}")
    assert (tmp_path / "died").exists()
    assert done.returncode == 0, done.stderr
    assert [row["samples"] for row in Run.open(tmp_path / "run").epochs] == [80, 80, 80]
    assert left_after(30, "", tmp_path)[0] == []


def test_a_full_object_store_is_told_in_one_line(file: Path, run_cli: RunCli, tmp_path: Path) -> None:
    """The parameters take 128 MB, the store has 80 MB, and no disk takes what it can't hold."""
    small = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 << 20), "RAY_local_fs_capacity_threshold": "0"}
    done = run_cli("train", file, *ASYNC, "-p", "width=16000", env={**os.environ, **small})
    assert done.returncode == 1
    assert done.stderr.count("error: Ray's object store and the disk to which it spills are full (") == 1
    assert "--object-store-memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_after(30, "", tmp_path)[0] == []
