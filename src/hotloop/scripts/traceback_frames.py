"""Tracebacks of a script's errors without hotloop's frames, as if the script ran alone."""

from __future__ import annotations

import os
import sys
from types import TracebackType

HIDDEN = "<hotloop, left out as importlib._bootstrap is>"
"""File name of hotloop's functions that a script's own code calls without knowing it."""

_HOTLOOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def leave_out_our_frames() -> None:
    """An error that nothing catches is shown as if the script ran alone."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, _strip_own_frames(error))

    sys.excepthook = hook


def _strip_own_frames(error: BaseException) -> TracebackType | None:
    """Takes our frames out of an error's traceback, and out of those of the errors that led to it."""
    seen: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _strip_import_frames(one.__traceback__)
            ahead += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return error.__traceback__


def _strip_import_frames(trace: TracebackType | None) -> TracebackType | None:
    """Python's of an import go where ours follow, since Python itself leaves them out where none follow."""
    frames: list[TracebackType] = []
    while trace is not None:
        if not _file(trace).startswith((_HOTLOOP, HIDDEN)):
            frames.append(trace)
        else:
            while frames and _file(frames[-1]).startswith("<frozen importlib"):
                frames.pop()
        trace = trace.tb_next
    for one, after in zip(frames, [*frames[1:], None], strict=True):
        one.tb_next = after
    return frames[0] if frames else None


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
