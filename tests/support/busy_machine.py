"""Other programs beside a measurement: pretended, or real."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from hotloop.core.hardware import machine_load
from hotloop.core.hardware.machine_load import ACCEPT_LOAD, CpuUsage


def pretend_load(monkeypatch: pytest.MonkeyPatch, cores: float) -> None:
    """Other programs use so many cores, and nobody waits for them."""

    def now(cls: type[CpuUsage]) -> CpuUsage:
        at = time.monotonic()
        return CpuUsage(at, all_s=cores * at, own_s=0.0)

    monkeypatch.setenv(ACCEPT_LOAD, "0")
    monkeypatch.setattr(machine_load, "QUIET_WAIT_S", 0.0)
    monkeypatch.setattr(CpuUsage, "now", classmethod(now))


@contextmanager
def busy_process() -> Iterator[psutil.Process]:
    """A real program that uses a core, and is no child of this process."""
    shell = subprocess.run(["sh", "-c", "yes > /dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True)
    process = psutil.Process(int(shell.stdout))
    try:
        yield process
    finally:
        process.kill()
