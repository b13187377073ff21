"""The lines of a script that has no training steps, or none yet: a thread looks at the stack now and then."""

from __future__ import annotations

import _lsprof  # what cProfile is made of; a script that imports that one itself must not find it there already
import _thread  # what threading is made of; a script's own file of that name must not find Python's there already
import os
import sys
import time
from types import CodeType, FrameType
from typing import Any, cast

from hotloop.profiler.base.call_sites import CallSites, is_library
from hotloop.scripts.import_hook import ImportHook

_INTERVAL_S = 0.004

_SWITCH_S = 0.0002
"""With Python's own 5 ms all looks would find the lines that let go of the interpreter by themselves."""

_MAX_LINES, _MAX_RECORDS = 10_000, 200

CodeLine = tuple[int, int]
"""A line: id of its code, and number."""


class PlainLineSampler:
    """Samples the lines of one thread from `begin()` to `stop()`; a sample stands for the time since the one before.

    In training steps `lines.StackSampler` does so; it needs much that a script without torch shouldn't find imported.
    What is computed in compiled code is seen at the next line that lets go of the interpreter; NumPy does so in what
    takes long.
    """

    def __init__(self) -> None:
        self._sites, self._codes = CallSites(), dict[int, CodeType]()
        self._spent: dict[CodeLine, list[float]] = {}
        self._functions: dict[CodeLine, list[float]] = {}
        self._over, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._thread, self._on = 0, False
        self._switch_s = self._set_s = 0.0

    def begin(self) -> None:
        """Of the thread that calls."""
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _SWITCH_S))
        self._set_s = sys.getswitchinterval()
        self._thread, self._on = _thread.get_ident(), True
        # Python warns of a fork beside another thread.
        os.register_at_fork(before=self._pause, after_in_parent=self._resume, after_in_child=self._forget)
        self._resume()

    def stop(self) -> None:
        """For good; once this returns, nothing is looked at any more."""
        self._pause()
        self._give_back()

    def _give_back(self) -> None:
        if self._on:
            self._on = False
            if sys.getswitchinterval() == self._set_s:  # the script may have set its own meanwhile
                sys.setswitchinterval(self._switch_s)

    def _pause(self) -> None:
        if self._on and self._over.locked():  # two threads may fork at a time
            self._over.release()
            self._ended.acquire()
            self._ended.release()

    def _resume(self) -> None:
        if self._on and not self._over.locked():
            self._over.acquire()
            self._ended.acquire()
            _thread.start_new_thread(self._sample, ())

    def _forget(self) -> None:
        """In a forked child there's no such thread."""
        self._give_back()

    def lines(self) -> list[dict[str, Any]]:
        """As `profiles.LineTime`, those that take longest themselves first; ms are of the whole run."""
        return self._records(self._spent)

    def functions(self) -> list[dict[str, Any]]:
        """The same of functions, each at its first line."""
        return self._records(self._functions)

    def _records(self, spent: dict[CodeLine, list[float]]) -> list[dict[str, Any]]:
        longest = sorted(spent.items(), key=lambda one: -one[1][1])[:_MAX_RECORDS]
        return [
            {
                "where": self._sites.place(self._codes[code].co_filename, line),
                "function": self._codes[code].co_qualname,
                "phase": "python",
                "ms": total_s * 1e3,
                "own_ms": own_s * 1e3,
            }
            for (code, line), (total_s, own_s) in longest
        ]

    def _sample(self) -> None:
        before = time.perf_counter()
        while not self._over.acquire(timeout=_INTERVAL_S):
            now = time.perf_counter()
            self._note(sys._current_frames().get(self._thread), now - before)
            before = now
        self._over.release()
        self._ended.release()

    def _note(self, frame: FrameType | None, passed_s: float) -> None:
        lines: set[CodeLine] = set()
        functions: set[CodeLine] = set()
        while frame is not None:
            code, line = frame.f_code, frame.f_lineno
            if self._sites.is_own(code) and line is not None:
                self._codes[id(code)] = code
                _add_time(self._spent, (id(code), line), passed_s, lines)
                _add_time(self._functions, (id(code), code.co_firstlineno), passed_s, functions)
            frame = frame.f_back


def _add_time(spent: dict[CodeLine, list[float]], place: CodeLine, passed_s: float, known: set[CodeLine]) -> None:
    """The innermost place of a stack has the time to itself; each counts once, however often it calls itself."""
    if place in known or (place not in spent and len(spent) >= _MAX_LINES):
        return
    took = spent.setdefault(place, [0.0, 0.0])
    took[0] += passed_s
    took[1] += 0.0 if known else passed_s
    known.add(place)


def fit_lines_to_functions(lines: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines whose own times add up to what was measured of their functions: looks rather find those that let go."""
    measured = {_function_key(one): one["own_ms"] for one in functions}
    looked: dict[tuple[str, str], float] = {}
    for one in lines:
        looked[_function_key(one)] = looked.get(_function_key(one), 0.0) + one["own_ms"]
    found = []
    for one in lines:
        name = _function_key(one)
        own_ms = one["own_ms"] * measured[name] / looked[name] if looked[name] and name in measured else one["own_ms"]
        found.append({**one, "own_ms": own_ms, "ms": max(one["ms"], own_ms)})
    return sorted(found, key=lambda one: -one["own_ms"])


def _function_key(one: dict[str, Any]) -> tuple[str, str]:
    return one["where"].rpartition(":")[0], one["function"]


_MAX_FUNCTIONS = 200

_OTHER_PROFILERS = (
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

_HAS_MONITORING = hasattr(sys, "monitoring")
"""From Python 3.12 on a profiler hears all threads, and would take what the one that samples lines calls for the script's."""


class PlainProfiler:
    """Profiles from the start of a script until it imports torch, or something that profiles or traces itself.

    From Python 3.12 on it leaves that to the looks at the stack, which give functions too.
    """

    def __init__(self) -> None:
        self.stopped_by = ""
        self._profiler: Any = _lsprof.Profiler(subcalls=True, builtins=True)
        self._others = ImportHook(_OTHER_PROFILERS, before=self.stop)
        self._on = False

    def begin(self) -> None:
        if _HAS_MONITORING:
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

    def functions(self, sites: CallSites) -> list[dict[str, Any]]:
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
        return sorted(found, key=lambda one: -one["own_ms"])[:_MAX_FUNCTIONS]


def _is_own(code: CodeType | str) -> bool:
    return isinstance(code, CodeType) and not is_library(code.co_filename)
