"""The allocator axis: memory that a CPU step frees stays with the process for the next step, or returns to the system.

By default glibc returns large blocks to the system at once. The next step gets them anew, and the system zeroes each
page at its first use: for large activations that takes half as long as the arithmetic. See mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hotloop.core.hardware.limits import GLIBC, active_allocator

if TYPE_CHECKING:
    from hotloop.lowering.context import LoweringContext

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameter numbers of <malloc.h>."""

_KEEP_OPTIONS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
"""Allocates all blocks from the heap, which never shrinks."""

_FIRST_THRESHOLD, _LAST_THRESHOLD = 128 << 10, 32 << 20
"""Bytes. Range of glibc's mmap threshold, which starts at the minimum and rises with the largest freed block."""

_PAGE, _MAPPED = 4096, 2
"""Page size in bytes; and the bit in the size field before a block that marks a block of its own mapping."""


class _AllocatorState:
    """The settings of this process' allocator, which all Programs share."""

    def __init__(self) -> None:
        self.keeps = False
        self._default: Mapping[int, int] | None = None

    def keep_freed(self, keeps: bool) -> None:
        """Changes the setting if it differs; switching off returns free memory to the system."""
        if keeps == self.keeps:
            return
        library = ctypes.CDLL(None)
        if self._default is None:  # read before the first mallopt, which ends glibc's dynamic thresholds
            self._default = _current_options(library)
        self.keeps = keeps
        _set_options(library, _KEEP_OPTIONS if keeps else self._default)
        if not keeps:
            library.malloc_trim(0)

    def leave(self) -> bool:
        """Ends the setting for good: glibc's dynamic thresholds can't come back, so the largest ones that they reach are set.

        A later network with larger blocks then gets its memory as if the thresholds still rose. Returns whether the
        setting was ever changed.
        """
        if self._default is None:
            return False
        self.keep_freed(False)
        self._default = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: _LAST_THRESHOLD, _TRIM_THRESHOLD: 2 * _LAST_THRESHOLD}
        _set_options(ctypes.CDLL(None), self._default)
        return True

    def forked(self) -> None:
        """Resets the setting in a forked child, such as a loader's worker, which runs no steps."""
        if self.keeps and self._default is not None:
            self.keeps = False
            _set_options(ctypes.CDLL(None), self._default)


def _set_options(library: ctypes.CDLL, values: Mapping[int, int]) -> None:
    for parameter, value in values.items():
        library.mallopt(parameter, value)


def _current_options(library: ctypes.CDLL) -> dict[int, int]:
    """Returns the options that leave the allocator as it is."""
    threshold = _mmap_threshold(library)
    trim = threshold if threshold == _FIRST_THRESHOLD else 2 * threshold
    return {_MMAP_MAX: 65536, _MMAP_THRESHOLD: threshold, _TRIM_THRESHOLD: trim}


def _mmap_threshold(library: ctypes.CDLL) -> int:
    """Returns the current mmap threshold in bytes, found by bisection with blocks that are never touched."""
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    low, high, blocks = _FIRST_THRESHOLD, _LAST_THRESHOLD, list[int]()
    while high - low > _PAGE:
        size = (low + high) // 2
        block = library.malloc(size)
        if block is None:  # no address space left
            break
        blocks.append(block)
        mapped = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED
        low, high = (low, size) if mapped else (size, high)
    _set_options(library, {_MMAP_THRESHOLD: high})  # fixes the threshold, which `free` would raise
    for block in blocks:
        library.free(block)
    return high if high - _FIRST_THRESHOLD > 2 * _PAGE else _FIRST_THRESHOLD


_ALLOCATOR = _AllocatorState()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _ALLOCATOR.forked())


def apply_allocator(parts: LoweringContext) -> LoweringContext:
    """Sets the allocator before training steps; the setting stays during evaluations, until the Program is closed."""
    keeps = parts.plan.allocator == "keep"
    if not keeps and active_allocator() != GLIBC:
        return parts
    return replace(parts, around=(*parts.around, partial(_keep_freed_memory, keeps)))


@contextmanager
def _keep_freed_memory(keeps: bool) -> Iterator[None]:
    _ALLOCATOR.keep_freed(keeps)
    yield


def keep_freed_memory(keeps: bool) -> None:
    """Changes the allocator of this process; switching off returns free memory to the system."""
    _ALLOCATOR.keep_freed(keeps)


def leave_freed_memory() -> bool:
    """Ends changes of the allocator with the largest thresholds of glibc's own rules; returns whether there were any."""
    return _ALLOCATOR.leave()


def keeps_freed_memory() -> bool:
    return _ALLOCATOR.keeps


def restore_allocator(parts: LoweringContext) -> None:
    """Restores the allocator if this plan changed it, and returns free memory to the system."""
    if parts.plan.allocator == "keep":
        _ALLOCATOR.keep_freed(False)
