"""Runs inside a profiled script's process: starts recording at torch's import, and writes the facts to a file.

Before that, nothing expensive is imported, and only the import of some modules is hooked. Code that runs at the
process's end compiles no text, as creating a dataclass or named tuple would: Python would forget that Ctrl-C ended the
process, and return another exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.timers.plain_python import PlainLineSampler, PlainProfiler, fit_lines_to_functions
from hotloop.scripts.child import ImportHook, hide_stops, imports_from, leave_out_our_frames, write_result


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
    from hotloop.profiler.child_processes import ChildCounter
    from hotloop.profiler.compile_race import race_compiled
    from hotloop.profiler.session.observers import make_observers
    from hotloop.profiler.session.session import ProfilerSession
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
