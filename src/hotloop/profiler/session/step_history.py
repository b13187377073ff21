"""Updates of other optimizers than the one that ends a step: which steps have one, and every how many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.phases import StepClock, durations
from hotloop.profiler.base.step_detection import Finder, TrainingEvent, is_end
from hotloop.profiler.base.step_facts import StepFact
from hotloop.profiler.hooks.optimizer_hooks import OptimizerRecorder


class RareUpdates:
    """Counts them in all steps, those that go by too, since the few that are measured may tell another number.

    Attributes:
        steps: that have ended.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._steps_with: defaultdict[int, list[int]] = defaultdict(list)

    def record(self, event: TrainingEvent, step: StepFact, uncounted: int) -> None:
        """Another optimizer has stepped in the step that is on, after so many that aren't counted yet."""
        seen, now = self._steps_with[event.which], self.steps + uncounted
        if not seen or seen[-1] != now:
            step.flags.append(_update_flag(event.which))
            seen.append(now)

    def extra_steps(self, measured: int) -> int:
        """How many steps go by beside those that must, so that steps watched alike aren't all those with an update, or without.

        In the order of Thue and Morse, which never comes into step with a loop.
        """
        return (measured // 2).bit_count() % 2 if self._steps_with else 0

    def records(self, optimizers: OptimizerRecorder) -> list[dict[str, Any]]:
        """Each with its flag, and every how many steps it comes."""
        known = {which: optimizers.class_and_line(which) for which in self._steps_with}
        return [
            {**known[which], "flag": _update_flag(which), "every": (at[-1] - at[0]) / (len(at) - 1)}
            for which, at in self._steps_with.items()
            if len(at) > 1
        ]


def _update_flag(which: int) -> str:
    return f"update {which}"


def early_steps(
    first: TrainingEvent, pieces: Sequence[tuple[TrainingEvent, StepFact]]
) -> tuple[TrainingEvent, list[StepFact]] | None:
    """Steps put together from pieces of time, with what is taken to end them; None without a whole one.

    Args:
        first: that happened before the first piece began.
        pieces: what happened at the end of each.
    """
    finder = Finder()
    for event in (first, *(event for event, _ in pieces)):
        finder.record(event)
    anchor = finder.guess()
    found: list[StepFact] = []
    together: StepFact | None = StepFact("instrumented") if is_end(anchor, first) else None
    for event, piece in pieces:
        if together is not None:
            _add_piece(together, piece)
        if is_end(anchor, event):
            found += [together] if together is not None else []
            together = StepFact("instrumented")
    return (anchor, found) if found else None


def _add_piece(step: StepFact, piece: StepFact) -> None:
    step.ms += piece.ms
    step.cpu_ms += piece.cpu_ms
    step.calls += piece.calls
    step.memory = piece.memory
    step.flags += [flag for flag in piece.flags if flag not in step.flags]
    for phase, ms in piece.phases.items():
        step.phases[phase] = step.phases.get(phase, 0.0) + ms
    for what, ms in piece.apart_ms.items():
        step.apart_ms[what] = step.apart_ms.get(what, 0.0) + ms


class PendingSteps:
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

    def read(self, clock: StepClock, mark_ms: float) -> None:
        """Gives the steps that the device has done their times, less what leaving a mark takes."""
        while self._steps and clock.has_passed(self._steps[0][1][-1][0]):
            step, marks = self._steps.pop(0)
            step.ms = clock.ms(marks[0][0], marks[-1][0])
            closely = step.kind in ("early", "instrumented", "whole")
            step.phases = durations(marks, clock, mark_ms) if closely else {}
