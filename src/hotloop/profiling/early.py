"""What can be said of a script that ends before its step is known: the time between the first things that train."""

from __future__ import annotations

from collections.abc import Sequence

from hotloop.profiling.facts import StepFact
from hotloop.profiling.steps import Event, Finder, ends_step


def early_steps(first: Event, pieces: Sequence[tuple[Event, StepFact]]) -> tuple[Event, list[StepFact]] | None:
    """Steps put together from pieces of time, with what is taken to end them; None without a whole one.

    Args:
        first: that happened before the first piece began.
        pieces: what happened at the end of each.
    """
    finder = Finder()
    for event in (first, *(event for event, _ in pieces)):
        finder.saw(event)
    anchor = finder.guess()
    found: list[StepFact] = []
    together: StepFact | None = StepFact("instrumented") if ends_step(anchor, first) else None
    for event, piece in pieces:
        if together is not None:
            _add(together, piece)
        if ends_step(anchor, event):
            found += [together] if together is not None else []
            together = StepFact("instrumented")
    return (anchor, found) if found else None


def _add(step: StepFact, piece: StepFact) -> None:
    step.ms += piece.ms
    step.cpu_ms += piece.cpu_ms
    step.calls += piece.calls
    step.memory = piece.memory
    step.flags += [flag for flag in piece.flags if flag not in step.flags]
    for phase, ms in piece.phases.items():
        step.phases[phase] = step.phases.get(phase, 0.0) + ms
    for what, ms in piece.apart_ms.items():
        step.apart_ms[what] = step.apart_ms.get(what, 0.0) + ms
