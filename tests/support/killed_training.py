"""Trainings in this process that are killed after a step: what tests of runs share.

`SIGKILL` of real processes is in tests/cli/test_sigkill.py; here an exception that nobody catches stands for it, so that
hundreds of them take seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.core.callback import View
from hotloop.training.cadence import SpanPacer
from hotloop.training.run import Run
from tests.support.tasks.full_state_task import task

EPOCHS, EVERY, KILLED_AT = 3, 5, 22  # of 39 steps; 22 is in the second epoch, the checkpoint before it at 20


class Killed(BaseException):
    """Ends training at once, as SIGKILL does: nothing is saved, and nobody may catch it."""


def at_step(step: int, act: Callable[[], Any]) -> Callable[[View], None]:
    """A callback that acts once, when so many steps are done."""
    waiting = [act]

    def callback(view: View) -> None:
        if view.step >= step and view.event in ("progress", "epoch") and waiting:
            waiting.pop()()

    return callback


def kill() -> None:
    raise Killed


def train(path: Path, given: hotloop.Task | None = None, *, until: int | None = None, **options: Any) -> Run | None:
    """Trains, or goes on if there is a run; killed after step `until`."""
    options = {"checkpoint_every": str(EVERY), "callbacks": [at_step(until, kill)] if until else []} | options
    if path.exists():
        options["resume"] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanPacer, "steps", lambda self: 1)  # looks up after each step, so that `until` is met
        try:
            return hotloop.fit(given or task(EPOCHS), run=path, device="cpu", **{"progress": False} | options)
        except Killed:
            return None


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """What the run's journal says of one kind."""
    return [event for event in Run.open(path).journal() if event["event"] == kind]
