"""Ends child processes when their parent process is killed (Linux)."""

from __future__ import annotations

import os
import signal
import sys

LAUNCHER = "HOTLOOP_LAUNCHER"
"""Environment variable with the process id of the launcher of the ranks."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Makes the system send this child a signal when its parent ends; ends the child if the parent is already dead.

    Linux sends the signal when the thread that started the child ends, so this thread must live as long as the child.

    Args:
        parent: the parent's process id.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # only processes that call this function need ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)
