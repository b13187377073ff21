"""Runs inside of the process of a watched script: begins when torch is imported, and leaves a file with what was seen.

Until then nothing is imported that costs anything, and nothing is changed but the finding of one module. What runs when
the process ends evaluates no text, as making a dataclass or a named tuple does: Python would forget by that that it was
ended by Ctrl-C, and end with another exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.timers.plain_python import PlainLineSampler, PlainProfiler, fit_lines_to_functions
from hotloop.scripts.child import write_result
from hotloop.scripts.import_hook import ImportHook, imports_from
from hotloop.scripts.traceback_frames import leave_out_our_frames


def wait_for_torch(settings: dict[str, Any]) -> None:
    """Waits for torch, and profiles functions until then; lines, until something trains.

    Args:
        settings: `out`, the file to leave; `steps`, to measure, or None; `trace`, a file for the Chrome trace, or None;
            `try_s`, for a race of the compiled network, or None.
    """
    path = sys.path[:]  # the script's folder isn't in it yet
    lines = PlainLineSampler()
    if "torch" in sys.modules:  # the machine's own `sitecustomize` has imported it
        leave_out_our_frames()
        _start_session_from(path, settings, lines)
        lines.begin()
        return
    plain = PlainProfiler()

    def before(name: str) -> None:
        plain.stop(name)
        plain.stopped_by = name
        leave_out_our_frames()  # its import may fail

    waiting = ImportHook({"torch"}, before=before, then=lambda: _start_session_from(path, settings, lines))
    waiting.begin()
    os.register_at_fork(after_in_child=waiting.end)
    process = os.getpid()
    atexit.register(lambda: _write_plain_facts(settings["out"], plain, lines) if os.getpid() == process else None)
    lines.begin()
    plain.begin()


def _write_plain_facts(out: str, plain: PlainProfiler, lines: PlainLineSampler) -> None:
    """The process ends: leaves what is known of a script that never imported torch."""
    if plain.stopped_by == "torch":
        return
    plain.stop(plain.stopped_by)
    lines.stop()
    timed = plain.functions(CallSites())
    note = "its lines were timed by looks at the stack, its functions "
    note += "by Python's own profiler, under which calls take longer" if timed else "too"
    if plain.stopped_by:
        note = f"it uses {plain.stopped_by} itself, so its functions were timed only until then"
    write_result(
        out,
        {
            "steps": [],
            "functions": timed or lines.functions(),
            "lines": fit_lines_to_functions(lines.lines(), timed),
            "notes": [note],
        },
    )


def _start_session_from(path: list[str], settings: dict[str, Any], lines: PlainLineSampler) -> None:
    """An error of the watch's own is none of the script's, which is importing torch."""
    try:
        with imports_from(path):
            start_session(settings, lines)
    except Exception as error:
        note = f"watching failed to begin by an error of hotloop's own: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_result(settings["out"], {"torch": True, "steps": [], "notes": [note], "closed": "it failed to begin"})


def start_session(settings: dict[str, Any], lines: PlainLineSampler | None = None) -> None:
    """torch is there: the watch begins; lines of the whole run, if they are looked at, are until something trains."""
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
            if try_s and watching.closed and facts.trained and facts.compiled is None:
                facts.compiled = race_compiled(watching.calls.recorder.largest, try_s, begin=watching.remove)
            if facts.trained:
                children.remove()  # it trains here
            elif watching.closed:
                facts.lines = lines.lines()
            write_result(settings["out"], facts.as_dict())

    compilations = CompilationRecorder()
    watching = ProfilerSession(
        settings["steps"],
        CallSites(),
        publish,
        lambda watch: make_observers(watch, settings["trace"]),
        compilations=compilations,
        trains=lines.stop,
    )
    watching.calls.recorder.on = bool(try_s)
    ImportHook({"torch._inductor.compile_fx"}, then=watching.note_compilations).begin()
    children.install()
    try:
        watching.install()
    except Exception as error:
        watching.fail(error)
    os.register_at_fork(after_in_child=watching.abandon)
    atexit.register(watching.close)
    atexit.register(lines.stop)
