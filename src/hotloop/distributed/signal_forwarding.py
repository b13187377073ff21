"""Passes Ctrl-C and SIGTERM on to the ranks of this machine."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from hotloop.core.processes import STOP_SIGNALS, signal_handlers

_PATIENCE_S = 5.0
"""Time for the ranks to end after a second Ctrl-C; a stopped rank, or one that waits in C++, doesn't end by itself."""

_POLL_S = 0.2
"""Time between two searches for newly started ranks, after a signal."""


class SignalForwarder:
    """Passes Ctrl-C and SIGTERM on to the ranks; torch's agent itself would kill them.

    Args:
        say: reports that ranks are killed.

    Attributes:
        heard: the last received signal; a fork that begins later inherits the value.
        active: whether this object receives signals: only the main thread may set handlers.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.heard: signal.Signals | None = None
        self.active = False
        self._say = say
        self._owner = os.getpid()
        self._others = {child.pid for child in psutil.Process().children()}
        self._came: queue.SimpleQueue[signal.Signals | None] = (
            queue.SimpleQueue()
        )  # a signal handler may call its `put`

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Passes signals on within the context, in a thread: the main thread may wait in torch's agent."""
        thread = threading.Thread(target=self._pass_on, name="hotloop-forwarding", daemon=True)
        thread.start()
        try:
            with signal_handlers(self._on_signal, *STOP_SIGNALS) as self.active:
                yield
        finally:
            self._came.put(None)
            thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.heard is not None and number == signal.SIGINT
        self.heard = signal.SIGINT if again else signal.Signals(number)
        if os.getpid() == self._owner:
            self._came.put(self.heard)

    def _pass_on(self) -> None:
        came: list[signal.Signals] = []
        sent: dict[int, int] = {}  # number of signals sent to each process
        kill_at: float | None = None
        while True:
            with suppress(queue.Empty):
                if (number := self._came.get(timeout=_POLL_S if came else None)) is None:
                    return
                if came and number == signal.SIGINT and kill_at is None:
                    kill_at = time.monotonic() + _PATIENCE_S
                came.append(number)
            for rank in self._ranks():
                for number in came[sent.get(rank.pid, 0) :]:
                    _send_signal(rank, number)
                sent[rank.pid] = len(came)
            if kill_at is not None and time.monotonic() > kill_at:
                self._kill()
                kill_at = None

    def _kill(self) -> None:
        if self._ranks():
            self._say(f"the ranks haven't ended {_PATIENCE_S:.0f}s after a second Ctrl-C: killing them")
        self.kill()

    def kill(self) -> None:
        for rank in self._ranks():
            _send_signal(rank, signal.SIGKILL)

    def _ranks(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in self._others]


def _send_signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
