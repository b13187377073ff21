"""Profiles an unmodified script in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    """Runs a script to its end and says where the time of its training steps goes.

    The script runs as `run_script` describes. What was seen until Ctrl-C or SIGTERM is kept.

    Args:
        path: of its file; or, as text, the name of a module to run as `python -m` does.
        steps: how many are measured, then the script runs on alone; None for 60, fewer if these would take over 30 s.
        stop_after_s: seconds after which the script is stopped, as by Ctrl-C; by SIGTERM if it goes on for `GRACE_S`.
        stdout: where its output goes, such as 2 for standard error; this process's if None.
        trace: a file for the Chrome trace of a few steps.
        try_s: seconds for a race of the compiled network, once enough steps are measured; the script waits for it. None
            for no race.

    Raises:
        TaskError: there is no such file.
    """
    settings = {"steps": steps, "try_s": try_s, "trace": str(trace.resolve()) if trace is not None else None}
    end = run_script(
        path,
        arguments,
        inside="hotloop.profiler.script_child:wait_for_torch",
        settings=settings,
        stop_after_s=stop_after_s,
        stdout=stdout,
    )
    facts = ProfileFacts.of(end.result) if end.result is not None else None
    profile = summarize(facts, str(path)) if facts is not None else _empty_profile(path)
    stopped = end.stopped or (facts.closed if facts is not None else "")
    return profile.model_copy(update={"exit_code": end.exit_code, "stopped": stopped, "seconds": end.seconds})


def _empty_profile(path: Path | str) -> Profile:
    """It ended before anything could be written down."""
    return Profile(source=str(path), steps=0, step_ms=None, notes=["it ended before anything was seen of it"])
