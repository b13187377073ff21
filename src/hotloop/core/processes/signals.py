"""Handles Ctrl-C, SIGTERM, SIGHUP and time limits: training stops between two steps and saves."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hotloop.errors import HotloopError

HANGUP: tuple[signal.Signals, ...] = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
"""The signal of a closed terminal (not on Windows)."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *HANGUP)

REPEAT_SIGNAL_S = 1.0
"""Signals within this time after an interruption count as the same interruption: a held key repeats Ctrl-C."""


class StopRequested(Exception):
    """Work was stopped for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def signal_handlers(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[bool]:
    """Sets `handler` as the handler of signals within the context, then restores the previous handlers.

    Yields whether the handler is set: only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = {number: signal.signal(number, handler) for number in numbers if not _is_ignored(number)}
    try:
        yield True
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _is_ignored(number: signal.Signals) -> bool:
    """Returns whether the process ignores SIGHUP, as under nohup."""
    return number in HANGUP and signal.getsignal(number) is signal.SIG_IGN


REASONS = (None, "stop-after", "SIGHUP", "SIGTERM", "SIGINT")
"""Reasons to stop, by increasing priority; ranks that stop together agree on the last reason of all."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP (`number`) arrived during work without a state to save."""

    def __init__(self, *arguments: object, number: int = signal.SIGTERM) -> None:
        super().__init__(*arguments)
        self.number = number


def end_reason(at: str, error: HotloopError | KeyboardInterrupt) -> dict[str, str]:
    """Returns the fields `ended_by` and `ended` of a record of work that ended early; `at` names the current work."""
    if isinstance(error, HotloopError):
        return {"ended_by": "failure", "ended": f"{at}: {error}"}
    by = signal.Signals(error.number).name if isinstance(error, Terminated) else "SIGINT"
    return {"ended_by": by, "ended": f"stopped by {by} at {at}"}


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise Terminated, and Ctrl-C KeyboardInterrupt, once per `REPEAT_SIGNAL_S`."""
    owner, raised_at = os.getpid(), -math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if os.getpid() != owner:  # a forked worker
            os._exit(128 + number)
        before, raised_at = raised_at, time.monotonic()
        if raised_at - before < REPEAT_SIGNAL_S:
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number=number)

    with signal_handlers(on_signal, *STOP_SIGNALS):
        yield


class StopSignals:
    """Decides whether training must stop.

    Attributes:
        stop_after_s: seconds from construction until the stop; None for never.
    """

    def __init__(self, stop_after_s: float | None = None) -> None:
        self.stop_after_s = stop_after_s
        self._start = time.monotonic()
        self._signal: signal.Signals | None = None
        self._raised_at = -math.inf

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Records SIGINT, SIGTERM and SIGHUP within the context; a second SIGINT raises KeyboardInterrupt."""
        with signal_handlers(self._on_signal, *STOP_SIGNALS):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            before, self._raised_at = self._raised_at, time.monotonic()
            if self._raised_at - before >= REPEAT_SIGNAL_S:
                raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def reason(self, reserve_s: float = 0.0) -> str | None:
        """Returns `SIGINT`, `SIGTERM`, `SIGHUP`, `stop-after`, or None; `reserve_s` is the expected time of saving."""
        if self._signal is not None:
            return self._signal.name
        if self.stop_after_s is not None and time.monotonic() - self._start + reserve_s >= self.stop_after_s:
            return "stop-after"
        return None

    def check(self, reserve_s: float = 0.0, largest: Callable[[list[int]], list[int]] = list) -> None:
        """Raises StopRequested if there is a reason to stop; `largest` computes the maximum over all ranks."""
        (place,) = largest([REASONS.index(self.reason(reserve_s))])
        if reason := REASONS[place]:
            raise StopRequested(reason)


_REPEAT_ALARM_S = 5.0
"""Seconds after which SIGALRM is repeated, in case code swallowed the error."""


class _TimeLimitReached(BaseException):
    """A BaseException, since libraries catch Exception."""


class _Alarm:
    """Handles SIGALRM; `at` is the time of the signal by `time.monotonic()`."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise _TimeLimitReached


@contextmanager
def time_limit(seconds: float, too_long: Callable[[], Exception]) -> Iterator[None]:
    """Ends the work within the context after so many seconds, with the error that `too_long` returns.

    An enclosing `time_limit` that ends earlier takes precedence. Only the main thread can be interrupted. Windows has
    no alarms, and so no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.monotonic()
    alarm, outer = _Alarm(began + seconds), signal.getsignal(signal.SIGALRM)
    if isinstance(outer, _Alarm) and outer.at <= alarm.at:
        yield
        return
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, 0.0)  # another library's timer, restored below
    try:
        with signal_handlers(alarm, signal.SIGALRM), _alarm(seconds):
            yield
    except _TimeLimitReached:
        raise too_long() from None
    finally:
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left_s - (time.monotonic() - began)), again_s)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_ALARM_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
