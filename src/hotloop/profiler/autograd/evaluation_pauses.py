"""Times evaluations and checkpoints inside of training steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from hotloop.profiler.autograd.patterns import AutogradPatterns
from hotloop.profiler.base.step_facts import StepFact

_MIN_SHARE = 0.4
"""Least share of steps with, and without, an evaluation for the evaluation to count as one of every second step."""


class EvaluationPauses:
    """Adds evaluations and checkpoints to the facts of the step in which they happen.

    Args:
        step: returns the current step.
    """

    def __init__(self, graphs: AutogradPatterns, step: Callable[[], StepFact | None]) -> None:
        self._graphs, self._step = graphs, step
        self._modes = 0
        self._returns = 0
        self._evaluated_before: dict[int, tuple[StepFact, float]] = {}
        self._evaluating_since: float | None = None
        self._saved: Counter[str] = Counter()

    @property
    def is_evaluating(self) -> bool:
        return self._evaluating_since is not None

    def mode_began(self) -> None:
        """Counts nested calls of `Module.train`, which calls itself for submodules."""
        self._modes += 1

    def mode_ended(self, *, training: bool) -> None:
        self._modes = max(0, self._modes - 1)
        if self._modes:
            return
        if training:
            self._note_evaluation()
            self.end_evaluation()
        elif not self.is_evaluating:
            self._evaluating_since = time.perf_counter()
            self._graphs.begin_evaluation()

    def _note_evaluation(self) -> None:
        """Adds the time since evaluation mode began, when the network returns to training mode."""
        step = self._step()
        if self._evaluating_since is not None and step is not None:
            self._returns += 1
            known_s = self._evaluated_before.get(id(step), (step, 0.0))[1]
            self._evaluated_before[id(step)] = step, known_s + time.perf_counter() - self._evaluating_since

    def end_evaluation(self) -> None:
        if self._evaluating_since is not None:
            self.note("evaluation", time.perf_counter() - self._evaluating_since)
            self._evaluating_since = None
            self._graphs.end_evaluation()

    def note(self, what: str, seconds: float) -> None:
        step = self._step()
        if step is not None:
            step.flags += [what] if what not in step.flags else []
            step.apart_ms[what] = step.apart_ms.get(what, 0.0) + seconds * 1e3

    def checkpoint_saved(self, where: str, began: float | None) -> None:
        """Records a checkpoint if its start, in `time.perf_counter` seconds, is known."""
        if began is not None:
            self.note("checkpoint", time.perf_counter() - began)
            self._saved[where] += 1

    def records(self, steps: Sequence[StepFact], steps_done: int) -> list[dict[str, Any]]:
        """Returns records as `profiles.Habit`.

        They are checkpoints that more than half of the measured steps write, and evaluations of every second step,
        which the observed steps may miss.

        Args:
            steps_done: number of steps that have ended, measured or not.
        """
        measured = [step for step in steps if step.kind in ("clean", "instrumented")]
        return [*self._checkpoints(measured), *self._evaluations(steps_done, measured)]

    def _evaluations(self, steps_done: int, measured: Sequence[StepFact]) -> list[dict[str, Any]]:
        """Counts evaluations over all steps: the measured steps may be every second one."""
        evaluated_ms = {id(step): 1e3 * seconds for step, seconds in self._evaluated_before.values()}
        per_step = self._returns / max(1, steps_done)
        pauses_ms = [evaluated_ms[id(step)] for step in measured if id(step) in evaluated_ms] or list(
            evaluated_ms.values()
        )
        if not self._graphs.evaluated_at or not _MIN_SHARE <= per_step < 1 - _MIN_SHARE or not measured:
            return []
        ((where, _),) = self._graphs.evaluated_at.most_common(1)
        ms = per_step * sum(pauses_ms) / len(pauses_ms)
        rest_ms = sum(max(0.0, step.ms - evaluated_ms.get(id(step), 0.0)) for step in measured) / len(measured)
        return [{"what": "evaluation", "where": where, "per_step": per_step, "share": ms / (ms + rest_ms), "ms": None}]

    def _checkpoints(self, measured: Sequence[StepFact]) -> list[dict[str, Any]]:
        spent = [step.apart_ms["checkpoint"] for step in measured if "checkpoint" in step.apart_ms]
        if 2 * len(spent) <= len(measured) or not self._saved:
            return []
        ((where, _),) = self._saved.most_common(1)
        return [{"what": "checkpoint", "where": where, "per_step": len(spent) / len(measured), "ms": median(spent)}]
