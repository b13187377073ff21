"""Steps that have ended whose clock's marks aren't read yet, since a device may lie behind."""

from __future__ import annotations

from typing import Any

from hotloop.profiles import Phase
from hotloop.profiling.facts import StepFact
from hotloop.profiling.phases import Clock, durations


class Unread:
    """Keeps them in order."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepFact, list[tuple[Any, Phase]]]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: StepFact, marks: list[tuple[Any, Phase]]) -> None:
        self._steps.append((step, marks))

    def drop_measured(self) -> None:
        """Those alone stay that were seen before the step was known."""
        self._steps = [one for one in self._steps if one[0].kind == "early"]

    def read(self, clock: Clock, mark_ms: float) -> None:
        """Gives the steps that the device has done their times, less what leaving a mark takes."""
        while self._steps and clock.passed(self._steps[0][1][-1][0]):
            step, marks = self._steps.pop(0)
            step.ms = clock.ms(marks[0][0], marks[-1][0])
            closely = step.kind in ("early", "instrumented", "whole")
            step.phases = durations(marks, clock, mark_ms) if closely else {}
