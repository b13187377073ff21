"""What it costs to cut operations into more threads than there are cores, measured on operations of this machine."""

from __future__ import annotations

import statistics
import time

import torch

_SIZES = (256, 512)
_ROUNDS = 12
_MOST_S = 2.0


def crowding(threads: int, cores: int) -> float:
    """How many times as long operations take with so many threads as with one for each core, or one alone; 1 or more.

    Of the two, the better counts: where other programs keep the cores busy, that is the one thread. Products and
    elementwise operations run with each in turn, and the median of many rounds counts. Takes a second or two.
    """
    before = torch.get_num_threads()
    ratios: list[float] = []
    until = time.monotonic() + _MOST_S
    try:
        with torch.inference_mode():
            inputs = [torch.rand(size, size) for size in _SIZES]
            while len(ratios) < _ROUNDS and (not ratios or time.monotonic() < until):
                one, few, many = (_seconds(inputs, count) for count in (1, cores, threads))
                ratios.append(many / min(one, few))
    finally:
        torch.set_num_threads(before)
    return max(1.0, statistics.median(ratios))


def _seconds(inputs: list[torch.Tensor], threads: int) -> float:
    torch.set_num_threads(threads)
    for one in inputs:  # the first operation wakes the threads
        one @ one
    began = time.perf_counter()
    for one in inputs:
        for _ in range(3):
            (one @ one).relu()
    return time.perf_counter() - began
