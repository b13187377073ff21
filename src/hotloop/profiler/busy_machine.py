"""Warnings about other programs that use CPU cores during a profile."""

from __future__ import annotations

import statistics
import time

import torch

from hotloop.core.hardware.machine_load import is_busy
from hotloop.core.records.profile import ThreadUse

_NOTABLE_SLOWDOWN = 1.2
"""Smallest reported slowdown: duration of operations over their duration on an idle machine."""

_MATRIX_SIZES = (256, 512)

_ROUNDS = 12

_MAX_S = 2.0


def busy_warning(threads: ThreadUse | None) -> str:
    """Returns the warning that other programs use the cores; empty if they use almost none."""
    if threads is None or not is_busy(threads.others, threads.cores):
        return ""
    free, again = max(1, threads.cores - round(threads.others)), "run again when the machine is quiet"
    if threads.torch > free:
        again = f"set OMP_NUM_THREADS={free} and run again, best when the machine is quiet"
    return (
        f"The machine is busy: other programs kept {threads.others:.1f} of {threads.cores} cores busy. Times are too long, "
        f"and advice that depends on how fast operations are is left out: {again}."
    )


def with_oversubscription(threads: ThreadUse | None) -> ThreadUse | None:
    """Returns the threads, with the measured slowdown if torch has more threads than the machine has cores."""
    if threads is None or threads.torch <= threads.cores:
        return threads
    return threads.model_copy(update={"slower": oversubscription(threads.torch, threads.cores)})


def slowdown_notes(threads: ThreadUse | None) -> list[str]:
    """Returns a note with the current slowdown if torch's threads wait for cores that other programs use."""
    if threads is None or threads.torch > threads.cores:
        return []
    free = max(1, threads.cores - round(threads.others))
    slower = oversubscription(threads.torch, free) if threads.torch > free else 1.0
    if slower < _NOTABLE_SLOWDOWN:
        return []
    return [
        f"other programs kept {threads.others:.1f} of {threads.cores} cores busy, and the pieces of an operation wait for "
        f"each other: cut for {threads.torch} threads, operations take {slower:.1f} times as long as with {free} while "
        f"they run (OMP_NUM_THREADS={free}); times and limits are those of a shared machine"
    ]


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
