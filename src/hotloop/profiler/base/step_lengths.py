"""Corrects figures of single steps where steps have different lengths, such as episodes of reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median_low

from hotloop.profiler.base.schedule import DELAYED, Kind, middle_mean
from hotloop.profiler.base.step_facts import StepFact

_PER_STEP = ("ms", "calls", "per_step", "flops", "bytes")

_WITH_CALLS = 0.5
"""Least number per network call at which an operator or a pattern scales with the calls."""


class StepLengths:
    """The lengths of steps, in calls of networks.

    Graphs and operators are recorded in a few steps only. If these steps are shorter or longer than the timed steps,
    their figures per step are wrong by the same factor.

    Args:
        steps: all recorded steps.
        timed: the steps with phases, whose length is the usual one.
    """

    def __init__(self, steps: Sequence[StepFact], timed: Sequence[StepFact]) -> None:
        calls = [step.calls for step in timed]
        self._steps, self._usual = steps, middle_mean(calls) if len(set(calls)) > 1 else 0.0

    def operator(self, record: dict) -> dict:
        """Returns an operator of the traced steps, per usual step. The update runs once in a step of any length."""
        if not (recorded := self._record_lengths("traced")) or record["phase"] == "update":
            return record
        limit = DELAYED * median_low([step.ms for step in recorded])
        calls = fmean([step.calls for step in recorded if step.ms <= limit])
        return self._correct(record, record["calls"], calls)

    def habit(self, record: dict) -> dict:
        """Returns a pattern, recorded as the median of the pattern steps, per usual step."""
        if not (recorded := self._record_lengths("habits")):
            return record
        return self._correct(record, record["per_step"], median_low([step.calls for step in recorded]))

    def _record_lengths(self, kind: Kind) -> list[StepFact]:
        return [step for step in self._steps if self._usual and step.kind == kind and step.calls]

    def _correct(self, record: dict, many: float, calls: float) -> dict:
        ratio, runs = self._usual / calls, record.get("line_runs")
        corrected = {"line_runs": runs * ratio} if runs and runs >= _WITH_CALLS * calls else {}
        if many >= _WITH_CALLS * calls:
            corrected |= {name: record[name] * ratio for name in _PER_STEP if record.get(name)}
        return record | corrected
