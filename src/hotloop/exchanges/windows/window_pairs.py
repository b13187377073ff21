"""Pairs of windows of a script's steps, with and without an exchange."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

from hotloop.margins import MARGIN
from hotloop.tuning.races.statistics import Ratio, ratio_of, verdict_of

_MIN_STEPS, _MIN_WINDOW_S = 6, 0.05
"""Least steps and seconds of a window; the first step of a window is not timed."""

_SLOW_STEPS, _SLOW_WINDOW_S = 2, 0.5
"""Least steps of a window that has lasted so many seconds."""

_CHECKED_PAIRS = (12, 24, 48)
"""Numbers of pairs after which the interval is computed."""

_HOPELESS = ((2, 0.7), (4, 0.9))
"""Numbers of pairs, and medians below which a race ends after so many pairs."""


class WindowPairs:
    """Alternates windows with and without an exchange, in random order within a pair.

    Args:
        switch: switches the exchange on or off.
    """

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self._switch = switch
        self._random = random.Random(0)  # the script's generators are not read
        self._times: list[float] = []
        self._is_first = True
        self.restart()

    def restart(self) -> None:
        """Discards all pairs."""
        self._medians: dict[bool, list[float]] = {True: [], False: []}
        self._order: list[bool] = []
        self._begin_window()

    @property
    def count(self) -> int:
        """Number of complete pairs."""
        return min(map(len, self._medians.values()))

    @property
    def is_open(self) -> bool:
        """Whether a pair has begun."""
        return bool(self._order)

    def begin(self) -> None:
        """Begins a pair."""
        first = self._random.random() < 0.5
        self._order = [not first, first]
        self._switch(first)
        self._begin_window()

    def step_ended(self, seconds: float) -> float | None:
        """Adds a step of the open pair; returns the seconds of the last window if the pair is complete, else None."""
        if self._is_first:
            self._is_first = False
            return None
        self._times.append(seconds)
        length_s = math.fsum(self._times)
        if not _is_enough(len(self._times), length_s):
            return None
        self._medians[self._order.pop()].append(statistics.median(self._times))
        if not self._order:
            return length_s
        self._switch(self._order[-1])
        self._begin_window()
        return None

    def drop(self) -> None:
        """Drops a pair whose second window is missing."""
        self._medians = {form: times[: self.count] for form, times in self._medians.items()}
        self._order = []

    def ratio(self) -> Ratio | None:
        """Returns the time without the exchange over the time with it; None without a pair."""
        return ratio_of(self._medians[False], self._medians[True]) if self.count else None

    def _begin_window(self) -> None:
        self._times, self._is_first = [], True


def _is_enough(steps: int, seconds: float) -> bool:
    return (steps >= _MIN_STEPS and seconds >= _MIN_WINDOW_S) or (steps >= _SLOW_STEPS and seconds >= _SLOW_WINDOW_S)


def is_over(pairs: int, ratio: Ratio) -> bool:
    """Whether a race is over: surely faster or surely not, clearly slower after few pairs, or long enough."""
    if any(pairs >= least and ratio.median < median for least, median in _HOPELESS):
        return True
    if pairs not in _CHECKED_PAIRS or ratio.high is None:
        return False
    return verdict_of(ratio) == "faster" or ratio.high < 1 + MARGIN or pairs == _CHECKED_PAIRS[-1]
