"""CPU time of other programs beside a measurement, and the wait for a time without them.

Other programs make measured times longer, and many threads more than one. So a measurement waits a few seconds for a quiet
machine, and measures the load until its end. A result beside other programs isn't stored for later runs, and isn't sure.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import psutil

from hotloop.core.hardware.limits import allowed_cores

ACCEPT_LOAD = "HOTLOOP_ACCEPT_LOAD"
"""Environment variable with which results beside other programs count: for a machine that always has such a load."""

QUIET_WAIT_S = 5.0
"""Longest wait for a quiet machine."""

_SAMPLE_S = 0.1
_BUSY_CORES, _BUSY_SHARE = 0.3, 0.1
"""Least cores, and least share of all cores, that other programs use on a busy machine."""


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds so far: of all programs on the cores of this process, and of this process with its children."""

    at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuUsage:
        every = psutil.cpu_times(percpu=True)
        cores = [every[core] for core in allowed_cores() if core < len(every)] or every
        return cls(time.monotonic(), sum(map(_busy_s, cores)), _own_cpu_s())


def _busy_s(times: Any) -> float:
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    return sum(times) - idle - guests


def _own_cpu_s() -> float:
    """Returns CPU seconds of this process, of its running children, and of the finished children of both."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:  # the child has ended
            continue
    return total


def cores_used_by_others(before: CpuUsage, after: CpuUsage) -> float:
    """Returns the average number of cores that other programs used, including other virtual machines."""
    wall = max(after.at - before.at, 1e-9)
    return max(0.0, (after.all_s - before.all_s) - (after.own_s - before.own_s)) / wall


def is_busy(others: float, cores: int) -> bool:
    """Returns whether other programs' use of the cores makes times unsure."""
    return others >= max(_BUSY_CORES, _BUSY_SHARE * cores)


class LoadMeter:
    """Measures what other programs use of the cores since its start."""

    def __init__(self) -> None:
        self._before = CpuUsage.now()

    def others(self) -> float:
        return cores_used_by_others(self._before, CpuUsage.now())

    def busy(self) -> str:
        """Returns a remark on a busy machine; empty if it was quiet, or if the user accepts the load."""
        others, cores = self.others(), len(allowed_cores())
        if accepts_load() or not is_busy(others, cores):
            return ""
        return (
            f"the machine was busy: other programs used {others:.1f} of its {cores} cores, so measured times are not sure, "
            "and nothing is stored for later runs"
        )


def accepts_load() -> bool:
    return os.environ.get(ACCEPT_LOAD, "") not in ("", "0")


def wait_until_quiet(limit_s: float = math.inf) -> None:
    """Returns once other programs leave the cores alone, after `limit_s` or `QUIET_WAIT_S` at the latest."""
    until = time.monotonic() + min(limit_s, QUIET_WAIT_S)
    while not accepts_load() and time.monotonic() < until:
        meter = LoadMeter()
        time.sleep(_SAMPLE_S)
        if not is_busy(meter.others(), len(allowed_cores())):
            return
