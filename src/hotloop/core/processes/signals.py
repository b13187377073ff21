"""Hearing Ctrl-C, SIGTERM and the clock, so that training stops between two steps and saves."""

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
"""The terminal is gone (not on Windows)."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *HANGUP)
"""Ctrl-C, how systems ask for an end, and a terminal that is closed."""

REPEAT_SIGNAL_S = 1.0
"""A key that is held down sends Ctrl-C many times: those that follow an interruption within this time mean the same one."""


class StopRequested(Exception):
    """Something was given up on the way, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def signal_handlers(hear: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[bool]:
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


def end_reason(at: str, error: HotloopError | KeyboardInterrupt) -> dict[str, str]:
    """`ended_by` and `ended` of a record of work that something kept from its end, at what was then done."""
    if isinstance(error, HotloopError):
        return {"ended_by": "failure", "ended": f"{at}: {error}"}
    by = signal.Signals(error.number).name if isinstance(error, Terminated) else "SIGINT"
    return {"ended_by": by, "ended": f"stopped by {by} at {at}"}


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Terminated, and Ctrl-C raises KeyboardInterrupt: once, however often they come in a moment."""
    owner, raised_at = os.getpid(), -math.inf

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if os.getpid() != owner:  # a forked worker, which ends without a word
            os._exit(128 + number)
        before, raised_at = raised_at, time.monotonic()
        if raised_at - before < REPEAT_SIGNAL_S:
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number=number)

    with signal_handlers(hear, *STOP_SIGNALS):
        yield


class StopSignals:
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
    def listen(self) -> Iterator[None]:
        """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them; a second SIGINT does interrupt."""
        with signal_handlers(self._on_signal, *STOP_SIGNALS):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            before, self._raised_at = self._raised_at, time.monotonic()
            if self._raised_at - before >= REPEAT_SIGNAL_S:
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
            raise StopRequested(reason)


_REPEAT_ALARM_S = 5.0
"""Seconds after which the message is repeated."""


class _TimeLimitReached(BaseException):
    """No Exception, which libraries catch on the way."""


class _Alarm:
    """Handles SIGALRM; `at` is when the signal comes, by `time.monotonic()`."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise _TimeLimitReached


@contextmanager
def time_limit(seconds: float, too_long: Callable[[], Exception]) -> Iterator[None]:
    """Ends what is done within it after so many seconds, as Ctrl-C would, with the error that `too_long` makes.

    Inside of another `time_limit` that ends earlier, the outer one alone counts. Only the main thread can be interrupted, and
    where there are no alarms (Windows) nothing is.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.monotonic()
    alarm, outer = _Alarm(began + seconds), signal.getsignal(signal.SIGALRM)
    if isinstance(outer, _Alarm) and outer.at <= alarm.at:
        yield
        return
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, 0.0)  # of somebody else, which goes on afterwards
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
