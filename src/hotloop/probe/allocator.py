"""Whose memory this process allocates, and whether it can be told to keep what is freed."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

GLIBC = "glibc"

_SET_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Variables of the environment by which a user has told glibc already."""


def in_use() -> str | None:
    """`glibc`, where a program may tell it what to keep; None for any other, or where the environment has told it."""
    told = any(map(os.environ.get, _SET_BY)) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return GLIBC if _is_glibcs() and not told else None


@cache
def _is_glibcs() -> bool:
    """Whether glibc's own `malloc` is the one in use: jemalloc and tcmalloc take its place where they are preloaded."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        used, own = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    except (ValueError, OSError, AttributeError):  # another C library
        return False
    return ctypes.cast(used, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value
