"""Hearing Ctrl-C, SIGTERM and the clock, so that training stops between two steps and saves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hotloop.errors import HotloopError
from hotloop.handlers import INTERRUPTING, Stopped, handled

REASONS = (None, "stop-after", "SIGTERM", "SIGINT")
"""Why to stop: what several ranks have heard comes down to the last of these."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came where there was nothing to save."""


def how_ended(at: str, error: HotloopError | KeyboardInterrupt) -> dict[str, str]:
    """`ended_by` and `ended` of a record of work that something kept from its end, at what was then done."""
    if isinstance(error, HotloopError):
        return {"ended_by": "failure", "ended": f"{at}: {error}"}
    by = "SIGTERM" if isinstance(error, Terminated) else "SIGINT"
    return {"ended_by": by, "ended": f"stopped by {by} at {at}"}


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises Terminated, as Ctrl-C raises KeyboardInterrupt."""
    owner = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker, which ends without a word
            os._exit(128 + number)
        raise Terminated

    with handled(hear, signal.SIGTERM):
        yield


class Interrupts:
    """Whether to stop, and why.

    Attributes:
        stop_after_s: stop this long after `start`; None for never.
    """

    def __init__(self, stop_after_s: float | None = None) -> None:
        self.stop_after_s = stop_after_s
        self._start = time.monotonic()
        self._signal: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notes SIGINT and SIGTERM instead of dying of them; a second SIGINT does interrupt."""
        with handled(self._hear, *INTERRUPTING):
            yield

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def reason(self, reserve_s: float = 0.0) -> str | None:
        """`SIGINT`, `SIGTERM`, `stop-after`, or None; `reserve_s` is the time that saving will take."""
        if self._signal is not None:
            return self._signal.name
        if self.stop_after_s is not None and time.monotonic() - self._start + reserve_s >= self.stop_after_s:
            return "stop-after"
        return None

    def check(self, reserve_s: float = 0.0, largest: Callable[[list[int]], list[int]] = list) -> None:
        """Raises Stopped if there is a reason to stop; `largest` makes one of the reasons of ranks that stop together."""
        (place,) = largest([REASONS.index(self.reason(reserve_s))])
        if reason := REASONS[place]:
            raise Stopped(reason)
