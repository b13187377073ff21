"""Which line of the user's own code something was called from."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

from hotloop.scripts.traceback_frames import HIDDEN

_PROFILER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HOTLOOP = os.path.dirname(_PROFILER)
_TASK_PROFILE = os.path.join(_PROFILER, "task_profile.py")
_WATCHING = (_PROFILER, os.path.join(_HOTLOOP, "scripts"))
"""Folders of the code that profiles, and that stands between a script and its profile."""

_STDLIB = sysconfig.get_path("stdlib")
_MAX_PLACES = 1000
"""Places that are kept."""


class CallSites:
    """Finds the line; what it learns of files it keeps, since it's asked in every step.

    Args:
        folder: paths below it are given relative to it.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = os.path.join(os.path.realpath(folder or os.getcwd()), "")
        self._own: dict[int, tuple[CodeType, bool]] = {}  # by id, since hashing code goes through all of it
        self._places: dict[tuple[int, int], str] = {}

    def caller_line(self, depth: int = 2) -> str:
        """`file:line` of the innermost frame of the user's; of the innermost frame outside of hotloop if there is none.

        Empty where a Task's step itself calls: the lines that had it trained are none of the step's.
        """
        return self.line_above(sys._getframe(depth))

    def line_above(self, frame: FrameType | None) -> str:
        """Like `caller_line`, from a frame on."""
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
        """The line of the user's that calls a function of torch's itself; empty where somebody else does, as hotloop for a Task."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and frame.f_code.co_filename.startswith((*_WATCHING, HIDDEN)):
            frame = frame.f_back
        own = frame is not None and self.is_own(frame.f_code)
        return self._cached_place(frame.f_code, frame.f_lineno) if own and frame is not None else ""

    def caller_lines(self, depth: int = 2) -> tuple[str, ...]:
        """Like `caller_line`, and the user's lines around it, from inside out."""
        frame: FrameType | None = sys._getframe(depth)
        found: list[str] = []
        while frame is not None and not is_step(frame.f_code):
            if self.is_own(frame.f_code):
                found.append(self._cached_place(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return tuple(found) or (self.caller_line(depth + 1),)

    def caller_frame(self) -> tuple[FrameType | None, int]:
        """The innermost frame of the user's, if there is one, and how many lie between it and hotloop's."""
        frame: FrameType | None = sys._getframe(1)
        between = 0
        while frame is not None and not self.is_own(frame.f_code):
            between += not frame.f_code.co_filename.startswith((_HOTLOOP, HIDDEN))
            frame = frame.f_back
        return frame, between

    def functions_on_stack(self) -> list[tuple[str, int, frozenset[int]]]:
        """The user's functions that are on the stack, from inside out: file, line where each is, and all of its lines."""
        frame: FrameType | None = sys._getframe(1)
        found: list[tuple[str, int, frozenset[int]]] = []
        while frame is not None and not is_step(frame.f_code):
            if self.is_own(frame.f_code):
                lines = (line for _, _, line in frame.f_code.co_lines() if line is not None)
                found.append((frame.f_code.co_filename, frame.f_lineno, frozenset(lines)))
            frame = frame.f_back
        return found

    def _cached_place(self, code: CodeType, line: int) -> str:
        """It is asked for in every step, and what a file is called takes the system's time."""
        where = self._places.get((id(code), line))
        if where is None:
            where = self.place(code.co_filename, line)
            if len(self._places) < _MAX_PLACES:
                self._places[id(code), line] = where
        return where

    def place(self, file: str, line: int) -> str:
        """`file:line`, the file relative to the folder if it is in it."""
        return f"{os.path.realpath(file).removeprefix(self._folder)}:{line}"

    def is_own(self, code: CodeType) -> bool:
        """Whether code is the user's."""
        known = self._own.get(id(code))
        if known is None:
            known = self._own[id(code)] = code, not is_library(code.co_filename)
        return known[1]


def is_step(code: CodeType) -> bool:
    """Whether code is that of a Task's step, which hotloop writes, or has it run; what watches it is not."""
    file = code.co_filename
    return file.startswith(_HOTLOOP) and (file == _TASK_PROFILE or not file.startswith(_WATCHING))


def is_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package, to hotloop, or was written by torch's compiler."""
    installed = ("site-packages", "dist-packages", "torchinductor_")
    return file.startswith(("<", _HOTLOOP, _STDLIB)) or any(folder in file for folder in installed)
