"""Pairs of windows of a script's steps, with and without an exchange."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from hotloop.exchanges.windows.paired_times import PairedTimes, Seconds
from hotloop.exchanges.windows.step_times import TimedStep
from hotloop.margins import MARGIN
from hotloop.tuning.races.statistics import Ratio, verdict_of

_MIN_STEPS, _MIN_WINDOW_S = 6, 0.05
"""Least steps and seconds of a window; the first step of a window is not timed."""

_SLOW_STEPS, _SLOW_WINDOW_S = 2, 0.5
"""Least steps of a window that has lasted so many seconds."""

_CHECKED_PAIRS = (12, 24, 48)
"""Numbers of pairs after which the interval is computed."""

_HOPELESS = ((2, 0.7), (4, 0.9))
"""Numbers of pairs, and medians below which a race ends after so many pairs."""


_LEAST_ALIKE = 0.5
"""Least share of a window's steps that have a step of the same kind in the other window of the pair."""

_MOST_UNLIKE = 12
"""Pairs of windows without enough equal kinds, after which a race ends."""

_TRIMMED = 0.1
"""Share of the slowest and of the fastest steps of a kind that are left out, such as a step with an evaluation."""


class WindowPairs:
    """Alternates windows with and without an exchange, in random order within a pair, and compares steps of the same kind.

    Attributes:
        times: of a step in each pair.

    Args:
        switch: switches the exchange on or off.
    """

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self._switch = switch
        self._random = random.Random(0)  # the script's generators are not read
        self.restart()

    def restart(self) -> None:
        """Discards all pairs."""
        self.times, self._unlike, self._is_first = PairedTimes(), 0, True
        self._order: list[bool] = []
        self._windows = dict[bool, list[TimedStep]]()
        self._begin_window()

    @property
    def count(self) -> int:
        """Number of complete pairs."""
        return self.times.count

    @property
    def is_open(self) -> bool:
        """Whether a pair has begun."""
        return bool(self._order)

    @property
    def is_open_with(self) -> bool:
        """Whether a window with the exchange is measured now."""
        return bool(self._order) and self._order[-1]

    @property
    def is_unlike(self) -> bool:
        """Whether the windows have too few steps of the same kinds."""
        return self._unlike >= _MOST_UNLIKE

    def begin(self) -> None:
        """Begins a pair."""
        first = self._random.random() < 0.5
        self._order = [not first, first]
        self._switch(first)
        self._begin_window()

    def step_ended(self, step: TimedStep) -> float | None:
        """Adds a step of the open pair; returns the seconds of the last window if the pair is complete, else None."""
        if self._is_first:
            self._is_first = False
            return None
        self._steps.append(step)
        self._length_s += (
            step.seconds.wall_s
        )  # each step of a window costs the same, in short windows of many steps as well
        if not _is_enough(len(self._steps), self._length_s):
            return None
        length_s = self._length_s
        self._windows[self._order.pop()] = self._steps
        if self._order:
            self._switch(self._order[-1])
            self._begin_window()
            return None
        self._add_pair()
        return length_s

    def drop(self) -> None:
        """Drops a pair whose second window is missing."""
        self._order = []

    def ratio(self) -> Ratio | None:
        """Returns the time without the exchange over the time with it; None without a pair."""
        return self.times.ratio()

    def _add_pair(self) -> None:
        compared = compare_windows(self._windows[False], self._windows[True])
        self._unlike += compared is None
        if compared is not None:
            for exchanges, seconds in zip((False, True), compared, strict=True):
                self.times.add(exchanges, seconds, len(self._windows[True]))

    def _begin_window(self) -> None:
        self._steps, self._length_s, self._is_first = list[TimedStep](), 0.0, True


def compare_windows(one: Sequence[TimedStep], other: Sequence[TimedStep]) -> tuple[Seconds, Seconds] | None:
    """Returns the mean time of a step in each window, over kinds that both have; None if the steps are unlike.

    A compiled module changes the number of recorded operations, and so do inputs of different lengths. Then steps with the same
    updates are compared.
    """
    for depth in (2, 1):
        mine, others = _by_kind(one, depth), _by_kind(other, depth)
        weights = {kind: len(mine[kind]) + len(others[kind]) for kind in mine.keys() & others.keys()}
        if all(
            sum(len(window[kind]) for kind in weights) >= _LEAST_ALIKE * len(steps)
            for window, steps in ((mine, one), (others, other))
        ):
            return _weighted(mine, weights), _weighted(others, weights)
    return None


def _by_kind(steps: Iterable[TimedStep], depth: int) -> dict[Hashable, list[Seconds]]:
    found = defaultdict[Hashable, list[Seconds]](list)
    for step in steps:
        found[step.kind[:depth]].append(step.seconds)
    return found


def _weighted(window: Mapping[Hashable, Sequence[Seconds]], weights: Mapping[Hashable, int]) -> Seconds:
    total = sum(weights.values())
    wall_s = sum(count * _trimmed([one.wall_s for one in window[kind]]) for kind, count in weights.items()) / total
    cpu = {kind: [one.cpu_s for one in window[kind] if one.cpu_s is not None] for kind in weights}
    if any(len(cpu[kind]) < len(window[kind]) for kind in weights):
        return Seconds(wall_s)
    return Seconds(wall_s, sum(count * _trimmed(cpu[kind]) for kind, count in weights.items()) / total)


def _trimmed(values: list[float]) -> float:
    """Returns the mean without the least and largest values: a median would jump between two kinds that look alike."""
    left_out = round(_TRIMMED * len(values))
    middle = sorted(values)[left_out : len(values) - left_out]
    return math.fsum(middle) / len(middle)


def _is_enough(steps: int, seconds: float) -> bool:
    return (steps >= _MIN_STEPS and seconds >= _MIN_WINDOW_S) or (steps >= _SLOW_STEPS and seconds >= _SLOW_WINDOW_S)


def is_over(race: WindowPairs) -> bool:
    """Whether a race is over: surely faster or surely not, clearly slower after few pairs, too costly, or long enough."""
    pairs, ratio = race.count, race.ratio()
    if race.is_unlike or race.times.is_costly:
        return True
    if ratio is None:
        return False
    if any(pairs >= least and race.times.most_gain < median for least, median in _HOPELESS):
        return True
    if pairs not in _CHECKED_PAIRS or ratio.high is None:
        return False
    return verdict_of(ratio) == "faster" or ratio.high < 1 + MARGIN or pairs == _CHECKED_PAIRS[-1]
