"""Times of pairs with and without an exchange, by wall clock and by CPU time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hotloop.tuning.races.statistics import Ratio, ratio_of

_MOST_COST = 0.01
"""Largest share of the time so far that a trial may cost before its interval is above 1."""

_FREE_S = 0.05
"""Seconds that a trial may cost in any case."""

_MOST_DELAY = 0.1
"""Share of the time that a thread waits for a core on a busy machine."""

_LEAST_CPU = 0.5
"""Least share of CPU time in the original's wall time: below, it waits for a core, a device or a worker process."""

_THREADS = Path("/proc/self/task")


class Seconds(NamedTuple):
    """Seconds by the wall clock, and of CPU time of all threads; None if unknown."""

    wall_s: float
    cpu_s: float | None = None

    def since(self, before: Seconds) -> Seconds:
        is_known = self.cpu_s is not None and before.cpu_s is not None
        return Seconds(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s if is_known else None)  # type: ignore[operator]

    def longer(self, seconds: float) -> Seconds:
        """Returns the time with so many seconds of computing more."""
        return Seconds(self.wall_s + seconds, None if self.cpu_s is None else self.cpu_s + seconds)


def read_clocks(*, reads_cpu: bool = True) -> Seconds:
    return Seconds(time.perf_counter(), time.process_time() if reads_cpu else None)


def is_costly(cost_s: float, run_s: float) -> bool:
    """Whether a trial without a result has cost too much of the time so far."""
    return cost_s > _FREE_S + _MOST_COST * run_s


class PairedTimes:
    """The times of both forms; the exchange's gain is the smaller one of both clocks.

    Other programs lengthen the wall time of calls by chance. A form with more threads takes less wall time and more CPU time.
    """

    def __init__(self) -> None:
        self._times: dict[bool, list[Seconds]] = {False: [], True: []}
        self._calls = 0
        self._began_s: float | None = None
        self._delays_s = dict[str, float]()

    @property
    def lost_s(self) -> float:
        """Seconds that the race has cost so far, by the clock and the median pair that show less: one call may be interrupted."""
        losses = [
            statistics.median(mine - other for mine, other in zip(exchange, original, strict=False))
            for original, exchange in self._columns()
        ]
        return self._calls * max(0.0, min(losses)) if losses else 0.0

    @property
    def is_costly(self) -> bool:
        """Whether the race has cost too much of the time since its first pair."""
        return self._began_s is not None and is_costly(self.lost_s, time.perf_counter() - self._began_s)

    @property
    def count(self) -> int:
        """Number of complete pairs."""
        return min(map(len, self._times.values()))

    def add(self, exchanges: bool, seconds: Seconds, count: int = 1) -> None:
        """Adds the time of one form, which stands for so many calls."""
        if self._began_s is None:
            self._began_s, self._delays_s = time.perf_counter(), _delays_s()
        self._times[exchanges].append(seconds)
        self._calls += count * exchanges

    def ratio(self) -> Ratio | None:
        """Returns the original's time over the exchange's, by the clock that shows less gain; None without a pair."""
        return min(self._ratios(), key=lambda one: (one.low or 0.0, one.median), default=None)

    @property
    def most_gain(self) -> float:
        """The median ratio by the clock that shows more gain; there must be a pair."""
        return max(one.median for one in self._ratios())

    def _ratios(self) -> list[Ratio]:
        return [ratio_of(original, exchange) for original, exchange in self._columns()]

    def _columns(self) -> Iterator[tuple[list[float], list[float]]]:
        """Yields the times of original and exchange by each clock that is known and fine enough."""
        original, exchange = self._times[False], self._times[True]
        if not self.count:
            return
        wall = [one.wall_s for one in original], [one.wall_s for one in exchange]
        yield wall
        cpu = [one.cpu_s or 0.0 for one in original], [one.cpu_s or 0.0 for one in exchange]
        if all(map(all, cpu)) and (sum(cpu[0]) > _LEAST_CPU * sum(wall[0]) or self.was_busy()):
            yield cpu

    def was_busy(self) -> bool:
        """Whether other programs took a tenth of the time from a thread, since the first pair."""
        if self._began_s is None:
            return False
        wall_s = time.perf_counter() - self._began_s
        waits = (late_s - self._delays_s.get(thread, 0.0) for thread, late_s in _delays_s().items())
        return max(waits, default=0.0) > _MOST_DELAY * wall_s


def _delays_s() -> dict[str, float]:
    """Returns the seconds for which each thread was ready and had no core; empty on systems that don't count them."""
    found = dict[str, float]()
    with suppress(OSError, ValueError, IndexError):
        for folder in _THREADS.iterdir():
            with suppress(OSError):  # the thread has ended
                found[folder.name] = int((folder / "schedstat").read_text().split()[1]) / 1e9
    return found
