"""Runs inside a profiled script's process: starts recording at torch's import, and writes the facts to a file.

Before that, nothing expensive is imported, and only the import of some modules is hooked. Code that runs at the
process's end compiles no text, as creating a dataclass or named tuple would: Python would forget that Ctrl-C ended the
process, and return another exit code.
"""

from __future__ import annotations

import _lsprof  # not cProfile: a script that imports cProfile must not find the module loaded
import _thread  # not threading: a script may have a file of this name
import atexit
import contextlib
import os
import sys
import time
from types import CodeType, FrameType
from typing import Any, cast

from hotloop.profiler.base.call_sites import CallSites, is_library
from hotloop.scripts.child import ImportHook, hide_stops, imports_from, leave_out_our_frames, write_result

_INTERVAL_S = 0.004
_SWITCH_S = 0.0002
"""With Python's default of 5 ms, all samples would find lines that release the GIL."""

_MAX_LINES, _MAX_RECORDS = 10_000, 200

CodeLine = tuple[int, int]
"""Id of the code, and line number."""


class PlainLineSampler:
    """Samples the lines of one thread from `begin()` to `stop()`; a sample counts for the time since the previous one.

    `StackSampler` does the same in training steps, but imports modules that a script without torch should not find
    imported. Time in compiled code counts to the next line that releases the GIL, as NumPy does in long operations.
    """

    def __init__(self) -> None:
        self._sites, self._codes = CallSites(), dict[int, CodeType]()
        self._spent: dict[CodeLine, list[float]] = {}
        self._functions: dict[CodeLine, list[float]] = {}
        self._over, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._thread, self._on = 0, False
        self._switch_s = self._set_s = 0.0

    def begin(self) -> None:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _SWITCH_S))
        self._set_s = sys.getswitchinterval()
        self._thread, self._on = _thread.get_ident(), True
        # Python warns of a fork beside another thread; a forked child has no sampling thread.
        os.register_at_fork(before=self._pause, after_in_parent=self._resume, after_in_child=self._give_back)
        self._resume()

    def stop(self) -> None:
        """Ends sampling; no sample is taken after the return."""
        self._pause()
        self._give_back()

    def _give_back(self) -> None:
        if self._on:
            self._on = False
            if sys.getswitchinterval() == self._set_s:  # unless the script has changed the interval
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

    def lines(self) -> list[dict[str, Any]]:
        """Returns fields of `LineTime`, the longest own time first; ms of the whole run."""
        return self._records(self._spent)

    def functions(self) -> list[dict[str, Any]]:
        """Like `lines`, by function, each at its first line."""
        return self._records(self._functions)

    def _records(self, spent: dict[CodeLine, list[float]]) -> list[dict[str, Any]]:
        longest = sorted(spent.items(), key=lambda one: -one[1][1])[:_MAX_RECORDS]
        return [_line_record(self._sites, self._codes[code], line, *spent_s) for (code, line), spent_s in longest]

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


def _line_record(sites: CallSites, code: CodeType, line: int, total_s: float, own_s: float) -> dict[str, Any]:
    times = {"phase": "python", "ms": total_s * 1e3, "own_ms": own_s * 1e3}
    return {"where": sites.place(code.co_filename, line), "function": code.co_qualname} | times


def _add_time(spent: dict[CodeLine, list[float]], place: CodeLine, passed_s: float, known: set[CodeLine]) -> None:
    """The innermost place of a stack gets the own time; a recursive place counts once."""
    if place in known or (place not in spent and len(spent) >= _MAX_LINES):
        return
    took = spent.setdefault(place, [0.0, 0.0])
    took[0] += passed_s
    took[1] += 0.0 if known else passed_s
    known.add(place)


def fit_lines_to_functions(lines: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scales own times of lines to their function's measured time: samples favor lines that release the GIL."""
    measured = {_function_key(function): function["own_ms"] for function in functions}
    sampled: dict[tuple[str, str], float] = {}
    for line in lines:
        sampled[_function_key(line)] = sampled.get(_function_key(line), 0.0) + line["own_ms"]
    found = []
    for line in lines:
        name, own_ms = _function_key(line), line["own_ms"]
        if sampled[name] and name in measured:
            own_ms *= measured[name] / sampled[name]
        found.append({**line, "own_ms": own_ms, "ms": max(line["ms"], own_ms)})
    return sorted(found, key=lambda line: -line["own_ms"])


def _function_key(record: dict[str, Any]) -> tuple[str, str]:
    return record["where"].rpartition(":")[0], record["function"]


_MAX_FUNCTIONS = 200
_OTHER_PROFILERS = "cProfile profile coverage pdb debugpy line_profiler memray pyinstrument viztracer yappi"

_HAS_MONITORING = hasattr(sys, "monitoring")
"""Since Python 3.12 profilers hook all threads, and would count the sampling thread's calls."""


class PlainProfiler:
    """Profiles functions until the script imports torch, a profiler or a tracer.

    Does nothing since Python 3.12, where `PlainLineSampler` provides functions too.
    """

    def __init__(self) -> None:
        self.stopped_by = ""
        self._profiler: Any = _lsprof.Profiler(subcalls=True, builtins=True)
        self._others = ImportHook(_OTHER_PROFILERS.split(), before=self.stop)
        self._on = False

    def begin(self) -> None:
        if _HAS_MONITORING:
            return
        self._others.begin()
        self._on = True
        os.register_at_fork(after_in_child=lambda: self.stop("a fork"))
        self._profiler.enable()

    def stop(self, why: str = "") -> None:
        if self._on:
            self._on = False
            self._others.end()
            if cast(Any, sys.getprofile()) is self._profiler:
                self._profiler.disable()
                self.stopped_by = why
            else:  # another profiler has replaced this one
                self.stopped_by = why or "sys.setprofile"

    def functions(self, sites: CallSites) -> list[dict[str, Any]]:
        """Returns fields of `LineTime` for user functions, the longest first; ms of the whole run."""
        found: list[dict[str, Any]] = []
        for entry in self._profiler.getstats():
            code = entry.code
            if isinstance(code, str) or not _is_own(code):
                continue
            inside = sum(call.totaltime for call in entry.calls or () if not _is_own(call.code))
            own_s = entry.inlinetime + inside
            found.append(_line_record(sites, code, code.co_firstlineno, entry.totaltime, own_s))
        return sorted(found, key=lambda one: -one["own_ms"])[:_MAX_FUNCTIONS]


def _is_own(code: CodeType | str) -> bool:
    return isinstance(code, CodeType) and not is_library(code.co_filename)


def wait_for_torch(settings: dict[str, Any]) -> None:
    """Waits for torch; until then profiles functions, and lines until training begins.

    Args:
        settings: `out`, the file to write; `steps`, to measure, or None; `trace`, a file for the Chrome trace, or None;
            `try_s`, seconds for a race of the compiled network, or None.
    """
    hide_stops(settings["out"])
    path = sys.path[:]  # without the script's folder
    lines = PlainLineSampler()
    if "torch" in sys.modules:  # imported by the machine's own `sitecustomize`
        leave_out_our_frames()
        _start_session_from(path, settings, lines)
        lines.begin()
        return
    plain = PlainProfiler()

    def before(name: str) -> None:
        plain.stop(name)
        plain.stopped_by = name
        leave_out_our_frames()  # the import may fail

    waiting = ImportHook({"torch"}, before=before, then=lambda: _start_session_from(path, settings, lines))
    waiting.begin()
    os.register_at_fork(after_in_child=waiting.end)
    process = os.getpid()
    atexit.register(lambda: _write_plain_facts(settings["out"], plain, lines) if os.getpid() == process else None)
    lines.begin()
    plain.begin()


def _write_plain_facts(out: str, plain: PlainProfiler, lines: PlainLineSampler) -> None:
    """At the process's end: writes the facts of a script that never imported torch."""
    if plain.stopped_by == "torch":
        return
    plain.stop(plain.stopped_by)
    lines.stop()
    timed = plain.functions(CallSites())
    note = "lines were timed by samples of the stack, functions "
    note += "by Python's own profiler, which slows calls" if timed else "too"
    if plain.stopped_by:
        note = f"the script uses {plain.stopped_by} itself, so functions were timed only until then"
    times = {"functions": timed or lines.functions(), "lines": fit_lines_to_functions(lines.lines(), timed)}
    write_result(out, {"steps": [], "notes": [note]} | times)


def _start_session_from(path: list[str], settings: dict[str, Any], lines: PlainLineSampler) -> None:
    """An internal error may not reach the script, which is importing torch."""
    try:
        with imports_from(path):
            start_session(settings, lines)
    except Exception as error:
        note = f"recording could not start by an internal error of hotloop: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_result(settings["out"], {"torch": True, "steps": [], "notes": [note], "closed": "it could not start"})


def start_session(settings: dict[str, Any], lines: PlainLineSampler | None = None) -> None:
    """Starts recording after torch's import; sampled lines of the whole run end when training begins."""
    from hotloop.profiler.compile_race import race_compiled
    from hotloop.profiler.hooks.resources import ChildCounter
    from hotloop.profiler.session import ProfilerSession, make_observers
    from hotloop.profiler.trace.inductor_kernels import CompilationRecorder

    process, children, lines = os.getpid(), ChildCounter(), lines or PlainLineSampler()
    try_s = settings.get("try_s")

    def publish(facts: Any) -> None:
        if os.getpid() == process:
            facts.children = children.count
            if try_s and session.closed and facts.trained and facts.compiled is None:
                facts.compiled = race_compiled(session.calls.recorder.largest, try_s, begin=session.remove)
            if facts.trained:
                children.remove()  # the script trains in this process
            elif session.closed:
                facts.lines = lines.lines()
            write_result(settings["out"], facts.as_dict())

    compilations = CompilationRecorder()
    session = ProfilerSession(
        settings["steps"],
        CallSites(),
        publish,
        lambda session: make_observers(session, settings["trace"]),
        compilations=compilations,
        trains=lines.stop,
    )
    session.calls.recorder.on = bool(try_s)
    ImportHook({"torch._inductor.compile_fx"}, then=session.note_compilations).begin()
    children.install()
    try:
        session.install()
    except Exception as error:
        session.fail(error)
    os.register_at_fork(after_in_child=session.abandon)
    atexit.register(session.close)
    atexit.register(lines.stop)
