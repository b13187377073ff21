"""The threads axis: how many share one operation on the CPU, and that they come to the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hotloop.lowering.ingredients import Ingredients


def with_threads(parts: Ingredients) -> Ingredients:
    """The plan's number of threads around training steps; whoever comes after finds the number from before."""
    threads = parts.plan.threads
    if threads is None:
        return parts

    @contextmanager
    def limited() -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return replace(parts, around=(*parts.around, limited))


def repeatable(parts: Ingredients) -> Ingredients:
    """Has several threads add up what meets in one element, such as a word's gradient, in the same order each time."""
    if any(device.type != "cpu" for device in parts.devices):
        return parts
    return replace(parts, around=(*parts.around, in_one_order))


@contextmanager
def in_one_order() -> Iterator[None]:
    """torch's deterministic algorithms, in what runs and in what is compiled; a single thread needs none."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if before or torch.get_num_threads() == 1:
        yield
        return
    try:
        torch.set_deterministic_debug_mode("warn")
        memory.fill_uninitialized_memory = False  # which finds faults, and takes time
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filled
