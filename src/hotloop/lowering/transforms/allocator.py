"""The allocator axis: what a step on the CPU frees stays with the process for the next step, or goes back to the system.

Left to itself, glibc gives large blocks back as soon as they are free, and the next step gets them anew from the system,
which zeroes each page again when it is first touched: for large activations that takes as long as half of the arithmetic.
How it is told: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hotloop.core.hardware.machine import GLIBC, active_allocator
from hotloop.lowering.context import LoweringContext

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters, as <malloc.h> numbers them."""

_KEEP_OPTIONS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
"""Each block comes out of the heap, and the heap never shrinks."""

_FIRST_THRESHOLD, _LAST_THRESHOLD = 128 << 10, 32 << 20
"""From which size on blocks are mapped one by one: glibc begins with the first, and goes up to the largest that was freed."""

_PAGE, _MAPPED = 4096, 2
"""A block's size stands before it, with a bit that says whether it is mapped by itself."""


class _AllocatorState:
    """What was told to this process' allocator, which all Programs share."""

    def __init__(self) -> None:
        self.keeps = False
        self._usual: Mapping[int, int] | None = None

    def keep_freed(self, keeps: bool) -> None:
        """Tells it, unless it is so already; what was kept goes back first."""
        if keeps == self.keeps:
            return
        library = ctypes.CDLL(None)
        if self._usual is None:  # once told anything, it leaves its thresholds where they are
            self._usual = _current_options(library)
        self.keeps = keeps
        _set_options(library, _KEEP_OPTIONS if keeps else self._usual)
        if not keeps:
            library.malloc_trim(0)

    def forked(self) -> None:
        """In a child, such as a loader's worker, that has no steps to keep anything for."""
        if self.keeps and self._usual is not None:
            self.keeps = False
            _set_options(ctypes.CDLL(None), self._usual)


def _set_options(library: ctypes.CDLL, values: Mapping[int, int]) -> None:
    for parameter, value in values.items():
        library.mallopt(parameter, value)


def _current_options(library: ctypes.CDLL) -> dict[int, int]:
    """What leaves the allocator as it is now."""
    threshold = _mmap_threshold(library)
    trim = threshold if threshold == _FIRST_THRESHOLD else 2 * threshold
    return {_MMAP_MAX: 65536, _MMAP_THRESHOLD: threshold, _TRIM_THRESHOLD: trim}


def _mmap_threshold(library: ctypes.CDLL) -> int:
    """The smallest size of which a block is mapped by itself now; blocks are asked for, and not touched."""
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    low, high, blocks = _FIRST_THRESHOLD, _LAST_THRESHOLD, list[int]()
    while high - low > _PAGE:
        size = (low + high) // 2
        block = library.malloc(size)
        if block is None:  # no room even for an address
            break
        blocks.append(block)
        mapped = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED
        low, high = (low, size) if mapped else (size, high)
    _set_options(library, {_MMAP_THRESHOLD: high})  # so that to free them doesn't change it
    for block in blocks:
        library.free(block)
    return high if high - _FIRST_THRESHOLD > 2 * _PAGE else _FIRST_THRESHOLD


_ALLOCATOR = _AllocatorState()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _ALLOCATOR.forked())


def apply_allocator(parts: LoweringContext) -> LoweringContext:
    """Tells the allocator before training steps; it stays told through evaluations, until the Program is closed."""
    keeps = parts.plan.allocator == "keep"
    if not keeps and active_allocator() != GLIBC:
        return parts
    return replace(parts, around=(*parts.around, partial(_keep_freed_memory, keeps)))


@contextmanager
def _keep_freed_memory(keeps: bool) -> Iterator[None]:
    _ALLOCATOR.keep_freed(keeps)
    yield


def keeps_freed_memory() -> bool:
    """Whether this process keeps what is freed now."""
    return _ALLOCATOR.keeps


def restore_allocator(parts: LoweringContext) -> None:
    """Has the allocator as it was before, if these parts told it; what is free then goes back to the system."""
    if parts.plan.allocator == "keep":
        _ALLOCATOR.keep_freed(False)
