"""The processes that a command started, whichever process is their parent now."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

MARK = "HOTLOOP_CAMPAIGN"
"""The environment variable that marks a command and the processes that the command starts."""

AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Two processes of Ray 2.60 that try for a minute to report the end of a killed cluster to this cluster, and then end."""


_AGENTS_S = 90.0
"""Time limit for the services of an ended cluster: an agent that starts while its cluster ends waits for it for a minute."""


def processes_of(mark: str, folder: Path) -> list[psutil.Process]:
    """Returns the living processes with this mark, and those that work in this folder; but not Ray's agents.

    Ray's workers overwrite their environment with their title, and forks show the environment of their parent process.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_marked = process.environ().get(MARK) == mark or Path(process.cwd()).is_relative_to(folder)
            is_agent = " ".join(process.cmdline()).startswith(AGENTS)
            if is_marked and not is_agent and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_after(seconds: float, mark: str, folder: Path) -> tuple[list[psutil.Process], float]:
    """Waits until no such process is left, for so many seconds at most; returns those that are left, and the time."""
    began = time.monotonic()
    while (left := processes_of(mark, folder)) and time.monotonic() - began < seconds:
        time.sleep(0.2)
    return left, time.monotonic() - began


@pytest.fixture(scope="module", autouse=True)
def no_process_of_ray_is_left() -> Iterator[None]:
    """For a module that imports this fixture: all clusters that its tests start end with the tests."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield
    del os.environ[MARK]
    deadline = time.monotonic() + _AGENTS_S
    while (left := _services(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [], f"processes of Ray that are left: {left}"


def _services(mark: str) -> list[str]:
    """The command lines of Ray's services with this mark; Ray's workers end with their service.

    The server of multiprocessing's forks lives as long as the tests, and names Ray's folder in its command line.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.environ().get(MARK) == mark and "/ray/" in line and "multiprocessing." not in line:
                found.append(line)
    return found
