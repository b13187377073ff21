"""The verdict on a module exchange from the errors of several compared calls, with the limits of `hotloop check`."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping

from hotloop.margins import TYPICAL_LIMIT, WORST_LIMIT

_CALLS = 3
"""Compared calls of which the median error counts."""


class ModuleErrors:
    """Errors of each tensor against float64 in the last calls, in multiples of the noise floor."""

    def __init__(self) -> None:
        self._errors: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_CALLS))
        self._calls = 0

    def add(self, errors: Mapping[str, float]) -> str:
        """Adds the errors of one call; returns what is clearly wrong, or an empty string."""
        self._calls += bool(errors)
        for name, error in errors.items():
            self._errors[name].append(error)
        name, worst = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
        if worst > WORST_LIMIT:
            return f"the error of its {name} is {worst:.3g} times the noise floor of the script's own"
        return self.verdict() if self.is_enough else ""

    @property
    def is_enough(self) -> bool:
        """Whether the median of enough calls is known."""
        return self._calls >= _CALLS

    def verdict(self) -> str:
        """Returns what is typically wrong; empty if nothing is."""
        typical = {name: statistics.median(errors) for name, errors in self._errors.items()}
        name, worst = max(typical.items(), key=lambda item: item[1], default=("", 0.0))
        if worst > TYPICAL_LIMIT:
            return f"the typical error of its {name} is {worst:.3g} times the noise floor of the script's own"
        return ""
