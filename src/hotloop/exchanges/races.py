"""Races of a script with and without an exchange: pairs of calls or of windows, their times, and when a race is over."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hotloop.margins import MARGIN
from hotloop.tuning.races.statistics import Ratio, ratio_of, verdict_of

_MOST_COST = 0.01
"""Largest share of the time so far that a trial may cost before its interval is above 1."""

_FREE_S = 0.05
"""Seconds that a trial may cost in any case."""

_MOST_DELAY = 0.1
"""Share of the time that a thread waits for a core on a busy machine."""

_LEAST_CPU = 0.5
"""Least share of CPU time in the original's wall time: below, it waits for a core, a device or a worker process."""

_THREADS = Path("/proc/self/task")

_MIN_STEPS, _MIN_WINDOW_S = 6, 0.05
"""Least steps and seconds of a window; the first step of a window is not timed."""

_SLOW_STEPS, _SLOW_WINDOW_S = 2, 0.5
"""Least steps of a window that has lasted so many seconds."""

_LEAST_ALIKE = 0.5
"""Least share of a window's steps that have a step of the same kind in the other window of the pair."""

_MOST_UNLIKE = 12
"""Pairs of windows without enough equal kinds, after which a race ends."""

_TRIMMED = 0.1
"""Share of the slowest and of the fastest steps of a kind that are left out, such as a step with an evaluation."""


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


class Alternation:
    """Both forms in random order within each pair, until the race is over.

    Attributes:
        times: of the pairs so far.
        checked_pairs: numbers of pairs after which the interval is computed: an interval at each pair would find chance
            differences.
        hopeless: numbers of pairs, and medians below which a race ends after so many pairs.
    """

    checked_pairs: tuple[int, ...]
    hopeless: tuple[tuple[int, float], ...] = ()

    def __init__(self) -> None:
        self._random = random.Random(0)  # the script's generators are not read
        self.times, self._order = PairedTimes(), list[bool]()

    @property
    def is_open(self) -> bool:
        """Whether a pair has begun."""
        return bool(self._order)

    @property
    def is_over(self) -> bool:
        """Whether a race is over: surely faster or surely not, clearly slower after few pairs, too costly, or long enough."""
        times, pairs = self.times, self.times.count
        if times.is_costly or any(pairs >= least and times.most_gain < median for least, median in self.hopeless):
            return True
        ratio = times.ratio() if pairs in self.checked_pairs else None
        if ratio is None or ratio.high is None:
            return False
        return verdict_of(ratio) == "faster" or ratio.high < 1 + MARGIN or pairs == self.checked_pairs[-1]

    def _begin_pair(self) -> bool:
        """Begins a pair; returns whether the exchange comes first."""
        first = self._random.random() < 0.5
        self._order = [not first, first]
        return first


class CallRace(Alternation):
    """Alternates the original and the exchange of one part on the script's own calls."""

    checked_pairs = (12, 24, 48, 96)

    @property
    def exchanges_next(self) -> bool:
        """Whether the next call uses the exchange."""
        return self._order[-1] if self._order else self._begin_pair()

    def add(self, seconds: Seconds) -> bool:
        """Records the time of the call that `exchanges_next` announced; returns whether the race is over."""
        self.times.add(self._order.pop(), seconds)
        return not self._order and self.is_over


class TimedStep(NamedTuple):
    """One step of the script.

    Attributes:
        seconds: that it took.
        kind: what it consists of: the numbers of updates of other optimizers, then the number of recorded operations, which a
            compiled module lowers. Steps of another kind take another time.
    """

    seconds: Seconds
    kind: tuple[Hashable, ...] = ()


class WindowPairs(Alternation):
    """Alternates windows with and without an exchange, and compares steps of the same kind.

    Args:
        switch: switches the exchange on or off.
    """

    checked_pairs = (12, 24, 48)
    hopeless = ((2, 0.7), (4, 0.9))
    _is_first: bool

    def __init__(self, switch: Callable[[bool], None]) -> None:
        super().__init__()
        self._switch = switch
        self.restart()

    def restart(self) -> None:
        """Discards all pairs."""
        self.times, self._order, self._unlike, self._is_first = PairedTimes(), [], 0, True
        self._windows = dict[bool, list[TimedStep]]()
        self._begin_window()

    @property
    def is_open_with(self) -> bool:
        """Whether a window with the exchange is measured now."""
        return bool(self._order) and self._order[-1]

    @property
    def is_unlike(self) -> bool:
        """Whether the windows have too few steps of the same kinds."""
        return self._unlike >= _MOST_UNLIKE

    @property
    def is_over(self) -> bool:
        """As for all races; or the windows are unlike."""
        return self.is_unlike or super().is_over

    def begin(self) -> None:
        """Begins a pair."""
        self._switch(self._begin_pair())
        self._begin_window()

    def step_ended(self, step: TimedStep) -> float | None:
        """Adds a step of the open pair; returns the seconds of the last window if the pair is complete, else None."""
        if self._is_first:
            self._is_first = False
            return None
        self._steps.append(step)
        self._length_s += step.seconds.wall_s  # each step costs the same, in short windows of many steps as well
        steps, length_s = len(self._steps), self._length_s
        is_long = steps >= _MIN_STEPS and length_s >= _MIN_WINDOW_S
        if not is_long and not (steps >= _SLOW_STEPS and length_s >= _SLOW_WINDOW_S):
            return None
        self._windows[self._order.pop()] = self._steps
        if self._order:
            self._switch(self._order[-1])
            self._begin_window()
            return None
        compared = compare_windows(self._windows[False], self._windows[True])
        self._unlike += compared is None
        if compared is not None:
            for exchanges, seconds in zip((False, True), compared, strict=True):
                self.times.add(exchanges, seconds, len(self._windows[True]))
        return length_s

    def drop(self) -> None:
        """Drops a pair whose second window is missing."""
        self._order = []

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
