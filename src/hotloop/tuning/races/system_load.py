"""Whether the machine had other work to do while something was measured on it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch

_BUSY_SHARE = 0.1
"""Share of the cores that others may use before it is worth a word."""


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds used so far: by all on the cores that this process may use, and by this process with its children."""

    at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuUsage:
        return cls(time.monotonic(), sum(_busy_s(times) for times in _core_times()), _own_cpu_s())


def _core_times() -> list[Any]:
    """CPU times of the cores that this process may use; work on others is no trouble."""
    every = psutil.cpu_times(percpu=True)
    allowed = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else range(len(every))
    return [every[core] for core in allowed if core < len(every)] or every


def _busy_s(times: Any) -> float:
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice already
    return sum(times) - idle - guests


def _own_cpu_s() -> float:
    """CPU seconds of this process, its children that are done, and those that run."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.Error:  # it ended in between
            continue
    return total


def cores_used_by_others(before: CpuUsage, after: CpuUsage) -> float:
    """Cores that other programs kept busy on average, those of other virtual machines on this one included."""
    wall = max(after.at - before.at, 1e-9)
    return max(0.0, (after.all_s - before.all_s) - (after.own_s - before.own_s)) / wall


def busy_note(others: float, cores: int) -> str:
    """What to say of a machine on which others kept so many of its cores busy; empty if it's not worth a word."""
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
    """How many times as long operations take with so many threads as with one for each core, or one alone; 1 or more.

    Of the two, the better counts: where other programs keep the cores busy, that is the one thread. Products and
    elementwise operations run with each in turn, and the median of many rounds counts. Takes a second or two.
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
