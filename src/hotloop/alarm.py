"""Work that is given up when it takes too long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hotloop.handlers import handled

_AGAIN_S = 5.0
"""After which it is said once more, for where it isn't heard."""


class _Over(BaseException):
    """No Exception, which libraries catch on the way."""


class _Alarm:
    """Handles SIGALRM; `at` is when the signal comes, by `time.monotonic()`."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise _Over


@contextmanager
def at_most(seconds: float, too_long: Callable[[], Exception]) -> Iterator[None]:
    """Ends what is done within it after so many seconds, as Ctrl-C would, with the error that `too_long` makes.

    Inside of another `at_most` that ends earlier, the outer one alone counts. Only the main thread can be interrupted, and
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
        with handled(alarm, signal.SIGALRM), _ringing(seconds):
            yield
    except _Over:
        raise too_long() from None
    finally:
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left_s - (time.monotonic() - began)), again_s)


@contextmanager
def _ringing(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
