"""A race between the original and the exchanged form of one part, on the script's own calls."""

from __future__ import annotations

import random

from hotloop.exchanges.windows.paired_times import PairedTimes, Seconds
from hotloop.tuning.races.statistics import verdict_of

_CHECKED_PAIRS = (12, 24, 48, 96)
"""Numbers of pairs after which the interval is computed: an interval at each pair would find chance differences."""


class CallRace:
    """Alternates both forms in pairs of calls, in random order within a pair.

    Attributes:
        times: of the pairs so far.
    """

    def __init__(self) -> None:
        self.times = PairedTimes()
        self._random = random.Random(0)  # the script's generators are not read
        self._order: list[bool] = []

    @property
    def exchanges_next(self) -> bool:
        """Whether the next call uses the exchange."""
        if not self._order:
            first = self._random.random() < 0.5
            self._order = [not first, first]
        return self._order[-1]

    def add(self, seconds: Seconds) -> bool:
        """Records the time of the call that `exchanges_next` announced; returns whether the race is over."""
        self.times.add(self._order.pop(), seconds)
        if self._order:
            return False
        if self.times.is_costly:
            return True
        pairs, ratio = self.times.count, self.times.ratio() if self.times.count in _CHECKED_PAIRS else None
        return ratio is not None and (pairs == _CHECKED_PAIRS[-1] or verdict_of(ratio) in ("faster", "slower"))
