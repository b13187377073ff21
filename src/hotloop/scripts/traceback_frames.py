"""Removes hotloop's frames from tracebacks of a script's errors, as if the script ran alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

HIDDEN = "<hotloop, left out as importlib._bootstrap is>"
"""File name of hotloop's functions that a script's code calls unknowingly."""

_HOTLOOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def leave_out_our_frames() -> Callable[[], None]:
    """Shows uncaught errors as if the script ran alone; returns a function that gives `sys.excepthook` back."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, strip_own_frames(error))

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo


def raise_signal_error(error: BaseException) -> None:
    """Raises an error again if a handler of a signal raised it, since the signal may arrive in hotloop's code as well.

    Does nothing with another error.
    """
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    current: BaseException | None = error
    while current is not None:
        trace = current.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                raise current
            trace = trace.tb_next
        current = current.__cause__ or current.__context__


def _code(handler: Any) -> CodeType | None:
    function = getattr(handler, "func", handler)  # of a partial
    return getattr(getattr(function, "__func__", function), "__code__", None)


def strip_own_frames(error: BaseException) -> TracebackType | None:
    """Removes hotloop's frames from an error and the errors that it follows; returns its traceback."""
    done: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in done:
            done.add(id(current))
            current.__traceback__ = _strip_import_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    return error.__traceback__


def _strip_import_frames(trace: TracebackType | None) -> TracebackType | None:
    """Removes Python's import frames before hotloop's, since Python removes only innermost import frames."""
    frames: list[TracebackType] = []
    while trace is not None:
        if not _file(trace).startswith((_HOTLOOP, HIDDEN)):
            frames.append(trace)
        else:
            while frames and _file(frames[-1]).startswith("<frozen importlib"):
                frames.pop()
        trace = trace.tb_next
    for entry, after in zip(frames, [*frames[1:], None], strict=True):
        entry.tb_next = after
    return frames[0] if frames else None


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
