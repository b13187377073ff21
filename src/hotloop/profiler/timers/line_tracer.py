"""Follows the user line that a thread executes, by Python's tracing, in a few steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType
from typing import Any

from hotloop.profiler.base.call_sites import is_step
from hotloop.profiler.base.transparency import can_keep_locals, clear_frame_variables, hide_from_compiler

_SUSPENDED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR

Line = tuple[str, int]
"""File and line number."""


@hide_from_compiler
class LineTracer:
    """Follows the lines of user frames, from the innermost frame that runs at `begin`.

    A frame whose code may store its dictionary of variables isn't followed: Python would fill the dictionary at each
    line.

    Attributes:
        line: the innermost user line; None before the first line and while paused.
    """

    def __init__(self, is_own: Callable[[CodeType], bool], moved: Callable[[], None]) -> None:
        self._is_own, self._moved = is_own, moved
        self._own: dict[CodeType, bool] = {}
        self._lines: list[Line | None] = []
        self._frames: list[FrameType] = []
        self._ran: Counter[Line] = Counter()
        self._called: Counter[tuple[CodeType, int, int]] = Counter()
        self._on = self._entered = False

    @property
    def lines(self) -> Sequence[Line | None]:
        """All current lines, outermost first."""
        return self._lines

    @property
    def line(self) -> Line | None:
        return self._lines[-1] if self._lines else None

    @property
    def runs(self) -> Counter[Line]:
        """Number of runs of each line since `begin`, or of calls by one instruction on the line, if more."""
        found = self._ran.copy()
        for (code, line, _), often in self._called.items():
            found[code.co_filename, line] = max(found[code.co_filename, line], often)
        return found

    def functions(self) -> dict[Line, str]:
        """Returns the names of the user functions that ran, by their lines."""
        own = [code for code, is_own in self._own.items() if is_own]
        lines = ((code, line) for code in own for _, _, line in code.co_lines() if line is not None)
        return {(code.co_filename, line): code.co_qualname for code, line in lines}

    def begin(self) -> bool:
        """Returns False, and follows nothing, if a debugger or coverage tool traces already."""
        self._lines, self._ran, self._called = [], Counter(), Counter()
        if sys.gettrace() is not None:
            return False
        self._frames = list(self._running(sys._getframe(1)))
        for frame in reversed(self._frames):
            self._lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame.f_trace = self._step
        self._on = True
        sys.settrace(self._call)
        return True

    def end(self) -> None:
        if not self._on:
            return
        sys.settrace(None)
        self._on = False
        for frame in [*self._frames, *self._running(sys._getframe(1))]:
            frame.f_trace = None
            clear_frame_variables(frame)
        self._lines, self._frames = [], []

    def pause(self) -> None:
        """Code from here on, as in a backward, is not called by the current line."""
        self._lines.append(None)

    def resume(self, depth: int) -> None:
        del self._lines[depth:]

    @property
    def depth(self) -> int:
        return len(self._lines)

    def _running(self, frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None and not is_step(frame.f_code):
            if self._owns(frame.f_code):
                yield frame
            frame = frame.f_back

    def _owns(self, code: CodeType) -> bool:
        own = self._own.get(code)
        if own is None:
            own = self._own[code] = self._is_own(code) and not can_keep_locals(code)
        return own

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._owns(frame.f_code):
            self._note_call(frame)
            return None
        if frame.f_code.co_flags & _SUSPENDED and all(known is not frame for known in self._frames):
            self._frames.append(frame)
        self._lines.append((frame.f_code.co_filename, frame.f_lineno))
        self._entered = True  # a lambda's first line is the line where it begins
        return self._step

    def _note_call(self, frame: FrameType) -> None:
        """Counts calls of library functions; resuming a generator is no call.

        Calls are counted by instruction, so that several modules called on one line don't count as a loop.
        """
        caller = frame.f_back
        if caller is not None and self._owns(caller.f_code) and not frame.f_code.co_flags & _SUSPENDED:
            self._called[caller.f_code, caller.f_lineno, caller.f_lasti] += 1

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            now = (frame.f_code.co_filename, frame.f_lineno)
            self._ran[now] += 1
            if self._lines and (self._entered or self._lines[-1] != now):
                self._entered = False
                self._lines[-1] = now
                self._moved()
        elif event == "return" and self._lines:
            self._entered = False
            self._lines.pop()
            self._moved()
        return self._step
