"""Hearing Ctrl-C, SIGTERM and the clock, so that training stops between two steps and saves."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hotloop.errors import HotloopError
from hotloop.handlers import IMPATIENCE_S, INTERRUPTING, Stopped, handled

REASONS = (None, "stop-after", "SIGHUP", "SIGTERM", "SIGINT")
"""Why to stop: what several ranks have heard comes down to the last of these."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came where there was nothing to save.

    Attributes:
        number: which of them.
    """

    def __init__(self, *said: object, number: int = signal.SIGTERM) -> None:
        super().__init__(*said)
        self.number = number


def how_ended(at: str, error: HotloopError | KeyboardInterrupt) -> dict[str, str]:
    """`ended_by` and `ended` of a record of work that something kept from its end, at what was then done."""
    if isinstance(error, HotloopError):
        return {"ended_by": "failure", "ended": f"{at}: {error}"}
    by = signal.Signals(error.number).name if isinstance(error, Terminated) else "SIGINT"
    return {"ended_by": by, "ended": f"stopped by {by} at {at}"}


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Terminated, and Ctrl-C raises KeyboardInterrupt: once, however often they come in a moment."""
    owner, raised_at = os.getpid(), -math.inf

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if os.getpid() != owner:  # a forked worker, which ends without a word
            os._exit(128 + number)
        before, raised_at = raised_at, time.monotonic()
        if raised_at - before < IMPATIENCE_S:
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number=number)

    with handled(hear, *INTERRUPTING):
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
        self._raised_at = -math.inf

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them; a second SIGINT does interrupt."""
        with handled(self._hear, *INTERRUPTING):
            yield

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            before, self._raised_at = self._raised_at, time.monotonic()
            if self._raised_at - before >= IMPATIENCE_S:
                raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def reason(self, reserve_s: float = 0.0) -> str | None:
        """`SIGINT`, `SIGTERM`, `SIGHUP`, `stop-after`, or None; `reserve_s` is the time that saving will take."""
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
