"""A trial's figures from its runs: the curve, the value, the spread, and the excess over constraints."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from hotloop.core.records.study import StudyRecord, TrialProgress
from hotloop.errors import StudyError

_UNITS = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_CONSTRAINT = re.compile(r"(memory|step_ms)\s*<=?\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmgt]?b?)", re.IGNORECASE)


def curve(runs: Sequence[TrialProgress]) -> list[float]:
    """Returns the mean over the runs of each epoch that all runs have completed."""
    return [statistics.fmean(values) for values in zip(*(run.values for run in runs), strict=False)]


def best_value(study: StudyRecord, runs: Sequence[TrialProgress]) -> float:
    """Returns the mean over the runs of their best epochs."""
    return statistics.fmean(_best_values(study, runs))


def spread(study: StudyRecord, runs: Sequence[TrialProgress]) -> float | None:
    """Returns the standard deviation over the runs; None for a single run."""
    return statistics.stdev(_best_values(study, runs)) if len(runs) > 1 else None


def _best_values(study: StudyRecord, runs: Sequence[TrialProgress]) -> list[float]:
    better = min if study.is_minimized else max
    return [better(filter(math.isfinite, run.values)) for run in runs]


def check_constraints(texts: Sequence[str]) -> list[str]:
    """Returns the constraints.

    Raises:
        StudyError: a constraint has another form.
    """
    for text in texts:
        _parse_constraint(text)
    return list(texts)


def violations(constraints: Sequence[str], runs: Sequence[TrialProgress]) -> dict[str, float]:
    """Returns by how much a trial exceeds each limit; 0 or less for a limit that is met."""
    found = {}
    for text in constraints:
        name, limit = _parse_constraint(text)
        measured = [run.memory_bytes if name == "memory" else run.step_ms for run in runs]
        found[text] = max((float(value) for value in measured if value is not None), default=0.0) - limit
    return found


def _parse_constraint(text: str) -> tuple[str, float]:
    match = _CONSTRAINT.fullmatch(text.strip())
    unit = match[3].lower() if match else ""
    if match is None or (match[1].lower() == "step_ms" and unit) or unit not in _UNITS:
        raise StudyError(f"--require {text!r}", expected="a limit such as 'memory < 4GB' or 'step_ms < 5'")
    return match[1].lower(), float(match[2]) * _UNITS[unit]
