"""Signals to who has started ranks, where these don't train yet, don't live, or can't hear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hotloop.distributed import launch as launching
from hotloop.distributed.join import join_ranks
from hotloop.distributed.launch import launch
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.forked_server import Server

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Entries:
    """Counts how often a rank began, and comes to `trouble` each time."""

    def __init__(self, folder: Path, trouble: Callable[[], Any]) -> None:
        self.folder, self.trouble = folder, trouble

    def __call__(self) -> None:
        (self.folder / str(os.getpid())).touch()
        self.trouble()

    @property
    def count(self) -> int:
        return len(list(self.folder.iterdir()))


def send_and_wait(number: int) -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), number)
    for _ in range(600):  # not in one go: Python hears a signal that comes just before a sleep only after it
        time.sleep(0.1)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_ranks_that_do_not_train_yet_ends_them_once_and_for_all(number: int, tmp_path: Path) -> None:
    said: list[str] = []
    entries = Entries(tmp_path, lambda: send_and_wait(number))
    assert launch(2, entries, said.append) == ("", 128 + number)
    assert entries.count <= 2
    assert not any("start again" in line for line in said)


def test_of_ranks_that_end_themselves_before_they_train_somebody_tells() -> None:
    """As commands do, which leave that to who has started them."""
    said: list[str] = []

    def entry() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        send_and_wait(signal.SIGTERM)

    assert launch(1, entry, said.append) == ("", 128 + signal.SIGTERM)
    assert said == ["stopped (SIGTERM)"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_there_are_ranks_is_not_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "end_openmp_threads", lambda: os.kill(os.getpid(), number))
    entries = Entries(tmp_path, lambda: None)
    assert launch(2, entries, print) == ("", 128 + number)
    assert entries.count == 0


ABORTING = """
import os, time
if os.environ["RANK"] == "1":
    os.write(2, b"terminate called: planted\\n")
    os.abort()
time.sleep(60)
"""


def test_a_rank_that_aborts_is_named_with_its_last_words() -> None:
    """Nobody else sees what ranks after the first write."""
    with pytest.raises(HotloopError, match=r"killed \(SIGABRT, after it wrote 'terminate called: planted'\)"):
        launch(2, [sys.executable, "-c", ABORTING], print, restarts=0)


def test_a_signal_before_ranks_start_again_is_not_lost(tmp_path: Path) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "start again" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    entries = Entries(tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert launch(1, entries, say) == ("", 128 + signal.SIGTERM)
    assert [line.partition(":")[0] for line in said] == ["rank 0 was killed (SIGKILL)", "stopped (SIGTERM)"]
    assert entries.count == 1


def stop_one_and_wait_for_it() -> None:
    """Rank 0 waits within gloo, where Python hears nothing; Ctrl-C comes twice."""
    with join_ranks(Plan(parallel="data", ranks=2), print, 2) as joined:
        if joined.world.is_rank_zero:
            dist.barrier()
        ctrl_c = f"sleep 0.5; kill -INT {os.getppid()}; "
        subprocess.Popen(["sh", "-c", ctrl_c * 2], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.more
def test_ranks_that_hear_no_second_ctrl_c_are_killed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_KILL_AFTER_S", 1.0)
    said: list[str] = []
    assert launch(2, stop_one_and_wait_for_it, said.append) == ("", 128 + signal.SIGINT)
    assert said[-2:] == ["the ranks haven't ended 1s after a second Ctrl-C: killing them", "stopped (SIGINT)"]


AT_THE_END = """
import os, signal, time
import psutil
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from hotloop.distributed.launch import launch

is_done = MultiprocessContext._is_done

def signalled(context):
    if done := is_done(context):
        os.kill(os.getpid(), signal.SIGTERM)
        while any(rank.status() != psutil.STATUS_ZOMBIE for rank in map(psutil.Process, context.pids().values())):
            time.sleep(0.05)
    return done

MultiprocessContext._is_done = signalled
print(launch(2, lambda: None, print))
"""


@pytest.mark.more
def test_a_signal_after_all_ranks_have_returned_ends_the_launcher(tmp_path: Path, server: Server) -> None:
    """Ranks that have returned wait until the launcher has their results, and die of a signal there."""
    (tmp_path / "at_the_end.py").write_text(AT_THE_END)
    process = server.start("at_the_end.py", script=True, cwd=tmp_path)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out.splitlines() == ["stopped (SIGTERM)", f"('', {128 + signal.SIGTERM})"]
