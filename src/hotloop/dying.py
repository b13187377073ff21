"""Processes that end when the one that started them is killed (Linux)."""

from __future__ import annotations

import os
import signal
import sys

LAUNCHER = "HOTLOOP_LAUNCHER"
"""Variable of the environment in which ranks of a command find the number of the process that started them."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """In a child, as soon as it runs: asks the system for a signal when the thread that started it ends.

    The thread counts and not the process: who starts the child must do so in a thread that lives as long as the child
    is wanted. A parent that was killed before the system knew is noticed here, and the child ends at once.

    Args:
        parent: the process that started it.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # a process that ends without its parent needs it, and no other

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)
