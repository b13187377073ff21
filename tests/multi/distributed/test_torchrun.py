"""Ranks that hotloop hasn't started itself: what becomes of them when one is lost, or when they are started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunCli
from tests.support.processes.forked_server import Server

pytestmark = pytest.mark.more

SCRIPT = """
import os
import signal
import torch
from torch import nn
import hotloop

calls = 0

def loss(output, target):
    global calls
    calls += 1
    if calls == 50 and os.environ["RANK"] == os.environ["CULPRIT"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, target)

def task():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    return hotloop.Task(model=lambda: nn.Linear(6, 2), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                        data=(x, (x[:, 0] > 0).long()), batch_size=4, epochs=1000)

if __name__ == "__main__":
    try:
        hotloop.fit(task(), run="run", plan=hotloop.Plan(parallel="data"), device="cpu", progress=False)
    except hotloop.HotloopError as error:
        print(error)
"""


def environment(rank: int, ranks: int, port: int, **more: str) -> dict[str, str]:
    seat = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in seat.items()}, **more}


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_lost_is_named_where_no_agent_of_hotloops_own_watches(
    culprit: int, port: int, tmp_path: Path, server: Server
) -> None:
    """The first rank holds the store, whose end tells of it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    processes: list[Any] = [
        server.start(
            tmp_path / "script.py", script=True, cwd=tmp_path, env=environment(rank, 2, port, CULPRIT=str(culprit))
        )
        for rank in range(2)
    ]
    try:
        out, err = processes[1 - culprit].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
    named = f"rank {1 - culprit} lost another rank"
    assert out.startswith(named) and out.endswith(f": rank {culprit} gives no sign of life\n"), err
    assert len(out.splitlines()) == 1


AFTERWARDS = """
import os
import sys
from dataclasses import replace
from script import hotloop, task

hotloop.fit(replace(task(), epochs=1), run="run", plan=hotloop.Plan(parallel="data"), device="cpu", progress=False)
threads = os.listdir("/proc/self/task") if sys.platform == "linux" else []
print(*sorted(open(f"/proc/self/task/{thread}/comm").read().strip() for thread in threads))
"""


def test_no_thread_of_the_group_outlives_a_training(port: int, tmp_path: Path) -> None:
    """One that lets go of a tensor while Python shuts down would abort the process, after all has been saved."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "afterwards.py").write_text(AFTERWARDS)
    ranks = [
        subprocess.Popen(
            [sys.executable, "afterwards.py"],
            cwd=tmp_path,
            env=environment(rank, 2, port, CULPRIT="none"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(rank.communicate(timeout=60)[0], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0, 0]
    assert [name for out, _ in ended for name in out.split() if "gloo" in name] == []


def test_ranks_that_would_begin_anew_are_told_to_name_their_run(port: int, tmp_path: Path, run_cli: RunCli) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    elastic = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_USE_AGENT_STORE": "False", "CULPRIT": "none"}
    options = ("--set", "parallel=data", "--device", "cpu", "--epochs", "1")
    done = run_cli("train", file, *options, env=environment(0, 1, port, **elastic))
    assert done.returncode == 1
    assert done.stderr.startswith("error: the run has no name, and torchrun has no store that outlives its ranks")
    assert not (tmp_path / "runs").exists()
    named = run_cli("train", file, *options, "--run", "named", env=environment(0, 1, port, **elastic))
    assert named.returncode == 0, named.stderr
