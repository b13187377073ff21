"""Handlers of signals, for a while, and what their signals raise where something is given up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HANGUP: tuple[signal.Signals, ...] = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
"""The terminal is gone (not on Windows)."""

INTERRUPTING = (signal.SIGINT, signal.SIGTERM, *HANGUP)
"""Ctrl-C, how systems ask for an end, and a terminal that is closed."""

IMPATIENCE_S = 1.0
"""A key that is held down sends Ctrl-C many times: those that follow an interruption within this time mean the same one."""


class Stopped(Exception):
    """Something was given up on the way, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def handled(hear: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[bool]:
    """Has `hear` handle signals meanwhile; those that did before do so again afterwards.

    Yields whether it does: only the main thread may set handlers, and whoever runs another hears the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    heard = [number for number in numbers if not _is_ignored(number)]
    before = {number: signal.signal(number, hear) for number in heard}
    try:
        yield True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored(number: signal.Signals) -> bool:
    """Whether somebody, such as nohup, decided that it means nothing here."""
    return number in HANGUP and signal.getsignal(number) is signal.SIG_IGN
