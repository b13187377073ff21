"""Profiles an unmodified script in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotloop.core.hardware.machine_load import wait_until_quiet
from hotloop.core.records.profile import Profile
from hotloop.profiler.base.step_facts import ProfileFacts
from hotloop.profiler.summary import summarize
from hotloop.scripts.script_process import run_script


def profile_script(
    path: Path | str,
    arguments: Sequence[str] = (),
    *,
    steps: int | None = None,
    stop_after_s: float | None = None,
    stdout: int | None = None,
    trace: Path | None = None,
    try_s: float | None = None,
) -> Profile:
    """Runs a script to its end and profiles its training steps; see `run_script`.

    After Ctrl-C or SIGTERM the profile has the records until then.

    Args:
        steps: number of measured steps, then the script runs on alone; None for 60, fewer if these take over 30 s.
        trace: a file for the Chrome trace of a few steps.
        try_s: seconds for a race of the compiled network after the measured steps; the script waits. None: no race.

    Raises:
        TaskError: the file doesn't exist.
    """
    settings = {
        "steps": steps,
        "try_s": try_s,
        "trace": str(trace.resolve()) if trace is not None else None,
    }
    wait_until_quiet()
    end = run_script(
        path,
        arguments,
        inside="hotloop.profiler.script_child:wait_for_torch",
        settings=settings,
        stop_after_s=stop_after_s,
        stdout=stdout,
    )
    facts = ProfileFacts.of(end.result) if end.result is not None else None
    if facts is None:
        notes = ["the script ended before anything was recorded"]
        profile = Profile(source=str(path), steps=0, step_ms=None, notes=notes)
    else:
        profile = summarize(facts, str(path))
    stopped = end.stopped or (facts.closed if facts is not None else "")
    return profile.model_copy(update={"exit_code": end.exit_code, "stopped": stopped, "seconds": end.seconds})
