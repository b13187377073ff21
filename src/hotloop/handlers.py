"""Handlers of signals, for a while, and what their signals raise where something is given up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTING = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and how systems ask for an end."""


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
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
