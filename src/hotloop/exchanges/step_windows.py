"""Windows of the script's own steps with and without the exchanges, which give the gain of the whole run."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from hotloop.profiler.base.step_detection import Finder, TrainingEvent, is_end
from hotloop.tuning.races.statistics import Ratio, ratio_of, verdict_of

_MIN_STEPS, _MIN_WINDOW_S = 6, 0.05
"""Least steps and seconds of a window; the first step of a window is not timed."""

_FIRST_PAIRS = 12
"""Pairs of windows that follow each other; later pairs are rare."""

_REST_WINDOWS = 200
"""Windows between two later pairs: one in 200 runs without exchanges, which is 0.5 % of the time."""

_MAX_PAIRS = 400

_LOST_UPDATES = 100
"""Updates of other optimizers after which the step's end is searched anew."""


class StepWindows:
    """Finds the steps, and switches the exchanges off in some windows.

    Attributes:
        enabled: whether used exchanges are on now.
        steps: number of steps so far.

    Args:
        can_begin: whether an exchange is used.
        report_slower: receives a line if the steps are slower with the exchanges.
        dry_run: switch the exchanges off after the first pairs.
    """

    def __init__(self, can_begin: Callable[[], bool], report_slower: Callable[[str], None], *, dry_run: bool) -> None:
        self.enabled, self.steps = True, 0
        self._can_begin, self._report_slower, self._dry_run = can_begin, report_slower, dry_run
        self._finder, self._numbers = Finder(), WeakKeyDictionary[Any, int]()
        self._anchor: TrainingEvent | None = None
        self._others = 0
        self._random = random.Random(0)
        self._last_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Discards the pairs, since an exchange was added or taken back."""
        self._pairs: dict[bool, list[float]] = {True: [], False: []}
        self._order: list[bool] = []
        self._times: list[float] = []
        self._rest = 0.0
        self._is_first, self._is_ready = True, False
        self.enabled = True

    def ratio_record(self) -> dict[str, Any] | None:
        """Returns the fields of `SpeedRatio`; None without a pair."""
        ratio = self._ratio()
        return None if ratio is None else asdict(ratio)

    def update_ended(self, optimizer: Any) -> None:
        """Records the end of an optimizer's update, which may be the end of a step."""
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        event = TrainingEvent("update", "", number)
        if self._anchor is None:
            self._finder.record(event)
            self._anchor = self._finder.anchor()
            return
        if not is_end(self._anchor, event):
            self._others += 1
            if self._others > _LOST_UPDATES:
                self._anchor, self._finder, self._last_s, self._others = None, Finder(), None, 0
                self._drop_pair()
            return
        self._others = 0
        self.steps += 1
        now = time.perf_counter()
        if self._last_s is not None:
            self._step_ended(now - self._last_s)
        self._last_s = now

    def _step_ended(self, seconds: float) -> None:
        if self._rest > 0:
            self._rest -= seconds
        elif not self._order:
            self._begin_pair()
        elif self._is_first:
            self._is_first = False
        else:
            self._times.append(seconds)
            if len(self._times) >= _MIN_STEPS and sum(self._times) >= _MIN_WINDOW_S:
                self._end_window()

    def _begin_pair(self) -> None:
        most = _FIRST_PAIRS if self._dry_run else _MAX_PAIRS
        if len(self._pairs[True]) >= most or not self._can_begin():
            return
        first = self._random.random() < 0.5
        self._order = [not first, first]
        self._begin_window()

    def _begin_window(self) -> None:
        self.enabled, self._times, self._is_first = self._order[-1], [], True

    def _end_window(self) -> None:
        self._pairs[self._order.pop()].append(statistics.median(self._times))
        length_s = math.fsum(self._times)
        if self._order:
            self._begin_window()
            return
        is_known = len(self._pairs[True]) >= _FIRST_PAIRS
        self.enabled = not (self._dry_run and is_known)
        if is_known:
            self._rest = length_s * _REST_WINDOWS
            self._judge()

    def _drop_pair(self) -> None:
        """Drops a pair whose second window is missing."""
        if self._order:
            least = min(map(len, self._pairs.values()))
            self._pairs = {form: times[:least] for form, times in self._pairs.items()}
            self._order, self.enabled = [], True

    def _judge(self) -> None:
        ratio = self._ratio()
        if ratio is not None and verdict_of(ratio) == "slower":
            self._report_slower(
                f"steps are {ratio.median:.2f} times as fast with it ({ratio.low:.2f} to {ratio.high:.2f})"
            )

    def _ratio(self) -> Ratio | None:
        pairs = min(map(len, self._pairs.values()))
        return ratio_of(self._pairs[False], self._pairs[True]) if pairs else None
