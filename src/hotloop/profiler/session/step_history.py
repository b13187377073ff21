"""Records across steps: rare optimizer updates, early steps, steps that the device has not finished."""

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
    """Counts updates of optimizers that don't end a step, in all steps: the few measured steps may be unrepresentative.

    Attributes:
        steps: number of ended steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._steps_with: defaultdict[int, list[int]] = defaultdict(list)

    def record(self, event: TrainingEvent, step: StepFact, uncounted: int) -> None:
        """Another optimizer has stepped in the current step, `uncounted` steps after `steps`."""
        steps, now = self._steps_with[event.which], self.steps + uncounted
        if not steps or steps[-1] != now:
            step.flags.append(_update_flag(event.which))
            steps.append(now)

    def extra_steps(self, measured: int) -> int:
        """Returns how many more steps to skip, so that not all steps of a kind have (or lack) a rare update.

        The number follows the Thue-Morse sequence, which never has a loop's period.
        """
        return (measured // 2).bit_count() % 2 if self._steps_with else 0

    def records(self, optimizers: OptimizerRecorder) -> list[dict[str, Any]]:
        """Returns each optimizer with its flag and its interval in steps."""
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
    """Joins pieces of time to steps; returns the event that ends a step, and the steps; None without a whole step.

    Args:
        first: the event before the first piece.
        pieces: each with the event at its end.
    """
    finder = Finder()
    for event in (first, *(event for event, _ in pieces)):
        finder.record(event)
    anchor = finder.guess()
    steps: list[StepFact] = []
    step: StepFact | None = StepFact("instrumented") if is_end(anchor, first) else None
    for event, piece in pieces:
        if step is not None:
            _add_piece(step, piece)
        if is_end(anchor, event):
            steps += [step] if step is not None else []
            step = StepFact("instrumented")
    return (anchor, steps) if steps else None


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
    """Steps whose marks the device has not reached yet, in order."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepFact, list[tuple[Any, Phase]]]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: StepFact, marks: list[tuple[Any, Phase]]) -> None:
        self._steps.append((step, marks))

    def drop_measured(self) -> None:
        """Drops all but early steps."""
        self._steps = [(step, marks) for step, marks in self._steps if step.kind == "early"]

    def read(self, clock: StepClock, mark_ms: float) -> None:
        """Fills in the times of finished steps, less the overhead of a mark."""
        while self._steps and clock.has_passed(self._steps[0][1][-1][0]):
            step, marks = self._steps.pop(0)
            step.ms = clock.ms(marks[0][0], marks[-1][0])
            has_phases = step.kind in ("early", "instrumented", "whole")
            step.phases = durations(marks, clock, mark_ms) if has_phases else {}
