"""Load of the machine by other programs during a measurement."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch

_BUSY_SHARE = 0.1
"""Share of the cores that other programs may use without a note."""


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds so far: of all programs on the cores of this process, and of this process with its children."""

    at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuUsage:
        return cls(time.monotonic(), sum(_busy_s(times) for times in _core_times()), _own_cpu_s())


def _core_times() -> list[Any]:
    every = psutil.cpu_times(percpu=True)
    allowed = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else range(len(every))
    return [every[core] for core in allowed if core < len(every)] or every


def _busy_s(times: Any) -> float:
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    return sum(times) - idle - guests


def _own_cpu_s() -> float:
    """Returns CPU seconds of this process, its finished and its running children."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.Error:  # the child has ended
            continue
    return total


def cores_used_by_others(before: CpuUsage, after: CpuUsage) -> float:
    """Returns the average number of cores that other programs used, including other virtual machines."""
    wall = max(after.at - before.at, 1e-9)
    return max(0.0, (after.all_s - before.all_s) - (after.own_s - before.own_s)) / wall


def busy_note(others: float, cores: int) -> str:
    """Returns a note on other programs' load; empty if the load is small."""
    if others < _BUSY_SHARE * cores:
        return ""
    return (
        f"the machine was busy: other programs used {others:.1f} of its {cores} cores, so intervals are wider, and plans "
        "of many threads look slower than on a machine of their own"
    )


_MATRIX_SIZES = (256, 512)

_ROUNDS = 12

_MAX_S = 2.0


def oversubscription(threads: int, cores: int) -> float:
    """Returns the slowdown of operations with `threads` threads relative to one per core or one alone; at least 1.

    The faster of the two counts: on busy cores that is one thread. The result is the median of many rounds, within
    2 s.
    """
    before = torch.get_num_threads()
    ratios: list[float] = []
    until = time.monotonic() + _MAX_S
    try:
        with torch.inference_mode():
            inputs = [torch.rand(size, size) for size in _MATRIX_SIZES]
            while len(ratios) < _ROUNDS and (not ratios or time.monotonic() < until):
                one, few, many = (_time_matmuls(inputs, count) for count in (1, cores, threads))
                ratios.append(many / min(one, few))
    finally:
        torch.set_num_threads(before)
    return max(1.0, statistics.median(ratios))


def _time_matmuls(inputs: list[torch.Tensor], threads: int) -> float:
    torch.set_num_threads(threads)
    for one in inputs:  # the first operation wakes the threads
        one @ one
    began = time.perf_counter()
    for one in inputs:
        for _ in range(3):
            (one @ one).relu()
    return time.perf_counter() - began
