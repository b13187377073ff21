"""Work that is given up when it takes too long."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hotloop.handlers import handled

_AGAIN_S = 5.0
"""After which it is said once more, for where it isn't heard."""


class _Over(BaseException):
    """No Exception, which libraries catch on the way."""


@contextmanager
def at_most(seconds: float, too_long: Callable[[], Exception]) -> Iterator[None]:
    """Ends what is done within it after so many seconds, as Ctrl-C would, with the error that `too_long` makes.

    Only the main thread can be interrupted, and where there are no alarms (Windows) nothing is.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        raise _Over

    try:
        with handled(hear, signal.SIGALRM) as heard, _alarm(seconds if heard else 0.0):
            yield
    except _Over:
        raise too_long() from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """None where there are 0."""
    if not seconds:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
