"""A script without torch: Python's own profiler says where its time goes, function by function."""

from __future__ import annotations

import _lsprof  # what cProfile is made of; a script that imports that one itself must not find it there already
import os
import sys
from types import CodeType
from typing import Any, cast

from hotloop.profiling.importing import AtImport
from hotloop.profiling.sites import Sites, is_library

_MOST = 200
_OTHERS = (
    "cProfile",
    "profile",
    "coverage",
    "pdb",
    "debugpy",
    "line_profiler",
    "memray",
    "pyinstrument",
    "viztracer",
    "yappi",
)
_HEARS_ALL = hasattr(sys, "monitoring")
"""From Python 3.12 on a profiler hears all threads, and would take what the one that samples lines calls for the script's."""


class PlainProfiler:
    """Profiles from the start of a script until it imports torch, or something that profiles or traces itself.

    From Python 3.12 on it leaves that to the looks at the stack, which give functions too.
    """

    def __init__(self) -> None:
        self.stopped_by = ""
        self._profiler: Any = _lsprof.Profiler(subcalls=True, builtins=True)
        self._others = AtImport(_OTHERS, before=self.stop)
        self._on = False

    def begin(self) -> None:
        if _HEARS_ALL:
            return
        self._others.begin()
        self._on = True
        os.register_at_fork(after_in_child=lambda: self.stop("a fork"))
        self._profiler.enable()

    def stop(self, why: str = "") -> None:
        """Stops for good."""
        if self._on:
            self._on = False
            self._others.end()
            if cast(Any, sys.getprofile()) is self._profiler:
                self._profiler.disable()
                self.stopped_by = why
            else:  # somebody else has taken the place, which there's but one of, and keeps it
                self.stopped_by = why or "sys.setprofile"

    def functions(self, sites: Sites) -> list[dict[str, Any]]:
        """As `profiles.LineTime`, one for each of the user's, at its first line, the longest first; ms are of the whole run."""
        found: list[dict[str, Any]] = []
        for entry in self._profiler.getstats():
            code = entry.code
            if isinstance(code, str) or not _is_own(code):
                continue
            inside = sum(call.totaltime for call in entry.calls or () if not _is_own(call.code))
            found.append(
                {
                    "where": sites.place(code.co_filename, code.co_firstlineno),
                    "function": code.co_qualname,
                    "phase": "python",
                    "ms": entry.totaltime * 1e3,
                    "own_ms": (entry.inlinetime + inside) * 1e3,
                }
            )
        return sorted(found, key=lambda one: -one["own_ms"])[:_MOST]


def _is_own(code: CodeType | str) -> bool:
    return isinstance(code, CodeType) and not is_library(code.co_filename)
