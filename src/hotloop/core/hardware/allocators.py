"""The allocator of this process: whether a program can configure it."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

GLIBC = "glibc"
_SET_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Environment variables that configure glibc's malloc."""


def active_allocator() -> str | None:
    """Returns `glibc` if a program can configure it; None for other allocators, or if the environment configures it."""
    is_configured = any(map(os.environ.get, _SET_BY)) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return GLIBC if _is_glibc_malloc() and not is_configured else None


@cache
def _is_glibc_malloc() -> bool:
    """Returns whether `malloc` is glibc's: preloaded jemalloc and tcmalloc replace it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        used, own = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    except (ValueError, OSError, AttributeError):  # another C library
        return False
    return ctypes.cast(used, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value
