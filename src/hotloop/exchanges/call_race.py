"""A race between the original and the exchanged form of one part, on the script's own calls."""

from __future__ import annotations

import random

from hotloop.tuning.races.statistics import Ratio, ratio_of, verdict_of

_CHECKED_PAIRS = (12, 24, 48, 96)
"""Numbers of pairs after which the interval is computed: an interval at each pair would find chance differences."""


class CallRace:
    """Alternates both forms in pairs of calls, in random order within a pair, and collects their times."""

    def __init__(self) -> None:
        self._random = random.Random(0)  # the script's generators are not read
        self._order: list[bool] = []
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    @property
    def exchanges_next(self) -> bool:
        """Whether the next call uses the exchange."""
        if not self._order:
            first = self._random.random() < 0.5
            self._order = [not first, first]
        return self._order[-1]

    def add(self, seconds: float) -> bool:
        """Records the time of the call that `exchanges_next` announced; returns whether the race is over."""
        self._seconds[self._order.pop()].append(seconds)
        pairs = len(self._seconds[True])
        if self._order or pairs not in _CHECKED_PAIRS:
            return False
        return pairs == _CHECKED_PAIRS[-1] or verdict_of(self.ratio()) in ("faster", "slower")

    def ratio(self) -> Ratio:
        """Returns the original's time over the exchange's."""
        return ratio_of(self._seconds[False], self._seconds[True])
