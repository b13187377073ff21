"""Finds the line of user code that a function was called from."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType

from hotloop.scripts.child import HIDDEN

_PROFILER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HOTLOOP = os.path.dirname(_PROFILER)
_TASK_PROFILE = os.path.join(_PROFILER, "task_profile.py")
_WATCHING = (_PROFILER, os.path.join(_HOTLOOP, "scripts"))
"""Folders whose code runs between a script and its profile; their frames are never reported."""

_STDLIB = sysconfig.get_path("stdlib")
_MAX_CACHED_PLACES = 1000


class CallSites:
    """Finds lines of user code on the stack (cached); paths below `folder` are relative to the folder."""

    def __init__(self, folder: str = "") -> None:
        self._folder = os.path.join(os.path.realpath(folder or os.getcwd()), "")
        self._own: dict[int, tuple[CodeType, bool]] = {}  # by id: hashing code reads all of its bytes
        self._places: dict[tuple[int, int], str] = {}

    def caller_line(self, depth: int = 2) -> str:
        """Returns `file:line` of the innermost user frame, else of the innermost frame outside of hotloop.

        Empty if a Task's step makes the call: the lines that started the training are no part of the step.
        """
        return self.line_above(sys._getframe(depth))

    def line_above(self, frame: FrameType | None) -> str:
        """Like `caller_line`, starting at a frame."""
        first = None
        while frame is not None:
            if self.is_own(frame.f_code):
                return self._cached_place(frame.f_code, frame.f_lineno)
            if is_step(frame.f_code):
                return ""
            if first is None and not frame.f_code.co_filename.startswith((_HOTLOOP, HIDDEN)):
                first = frame
            frame = frame.f_back
        return self._cached_place(first.f_code, first.f_lineno) if first is not None else ""

    def direct_caller_line(self, depth: int = 2) -> str:
        """Returns the user line that calls a torch function directly; empty if other code calls the function."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and frame.f_code.co_filename.startswith((*_WATCHING, HIDDEN)):
            frame = frame.f_back
        own = frame is not None and self.is_own(frame.f_code)
        return self._cached_place(frame.f_code, frame.f_lineno) if own and frame is not None else ""

    def caller_lines(self, depth: int = 2) -> tuple[str, ...]:
        """Like `caller_line`, for all user frames, innermost first."""
        frames = self._own_frames(sys._getframe(depth))
        found = tuple(self._cached_place(frame.f_code, frame.f_lineno) for frame in frames)
        return found or (self.caller_line(depth + 1),)

    def _own_frames(self, frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None and not is_step(frame.f_code):
            if self.is_own(frame.f_code):
                yield frame
            frame = frame.f_back

    def caller_frame(self) -> tuple[FrameType | None, int]:
        """Returns the innermost user frame, if any, and the number of library frames below that frame."""
        frame: FrameType | None = sys._getframe(1)
        between = 0
        while frame is not None and not self.is_own(frame.f_code):
            between += not frame.f_code.co_filename.startswith((_HOTLOOP, HIDDEN))
            frame = frame.f_back
        return frame, between

    def functions_on_stack(self) -> list[tuple[str, int, frozenset[int]]]:
        """Returns the user functions on the stack, innermost first: file, current line, all lines of the function."""
        return [
            (code.co_filename, frame.f_lineno, frozenset(line for _, _, line in code.co_lines() if line is not None))
            for frame in self._own_frames(sys._getframe(1))
            for code in [frame.f_code]
        ]

    def _cached_place(self, code: CodeType, line: int) -> str:
        where = self._places.get((id(code), line))
        if where is None:
            where = self.place(code.co_filename, line)  # makes system calls
            if len(self._places) < _MAX_CACHED_PLACES:
                self._places[id(code), line] = where
        return where

    def place(self, file: str, line: int) -> str:
        return f"{os.path.realpath(file).removeprefix(self._folder)}:{line}"

    def is_own(self, code: CodeType) -> bool:
        known = self._own.get(id(code))
        if known is None:
            known = self._own[id(code)] = code, not is_library(code.co_filename)
        return known[1]


def is_step(code: CodeType) -> bool:
    """Returns whether the code belongs to a Task's step, which hotloop writes or calls; profiler code does not."""
    file = code.co_filename
    return file.startswith(_HOTLOOP) and (file == _TASK_PROFILE or not file.startswith(_WATCHING))


def is_library(file: str) -> bool:
    """Returns whether a file belongs to Python, an installed package, hotloop, or the output of torch's compiler."""
    installed = ("site-packages", "dist-packages", "torchinductor_")
    return file.startswith(("<", _HOTLOOP, _STDLIB)) or any(folder in file for folder in installed)
