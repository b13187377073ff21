"""Windows of the script's own steps with and without all exchanges, which give the gain of the whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from hotloop.exchanges.windows.step_times import StepTimes, TimedStep
from hotloop.exchanges.windows.window_pairs import WindowPairs

_FIRST_PAIRS = 12
"""Pairs of windows that follow each other; later pairs are rare."""

_REST_WINDOWS = 200
"""Windows between two later pairs: one in 200 runs without exchanges, which is 0.5 % of the time."""

_MAX_PAIRS = 400


class StepWindows:
    """Switches the exchanges off in some windows.

    Attributes:
        enabled: whether used exchanges are on now.

    Args:
        can_begin: whether an exchange is used.
        report_slower: receives a line if the steps are slower with the exchanges.
        dry_run: switch the exchanges off after the first pairs.
        switched: is called with `enabled` after each change.
        races: receives each step; returns whether a race of its own needs this step.
    """

    def __init__(
        self,
        can_begin: Callable[[], bool],
        report_slower: Callable[[str], None],
        *,
        dry_run: bool,
        switched: Callable[[bool], None] = lambda enabled: None,
        races: Callable[[TimedStep], bool] = lambda step: False,
    ) -> None:
        self.enabled = True
        self._can_begin, self._report_slower, self._dry_run = can_begin, report_slower, dry_run
        self._switched, self._races = switched, races
        self._times = StepTimes(self._drop_pair)
        self._pairs = WindowPairs(self._switch)
        self._rest_s = self._with_s = self._earlier_gain_s = 0.0

    @property
    def gained_s(self) -> float:
        """Seconds that the used exchanges have saved so far, by the ratio of the windows; below zero if the steps are slower."""
        ratio = self._pairs.ratio()
        return self._earlier_gain_s + (0.0 if ratio is None else self._with_s * (ratio.median - 1))

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._times.steps

    @property
    def is_plain(self) -> bool:
        """Whether a window without exchanges is measured now."""
        return not self.enabled and self._pairs.is_open

    @property
    def needs_steps(self) -> bool:
        """Whether the next steps are timed, or the update that ends a step is unknown."""
        return not self._times.is_known or self._pairs.is_open or (self._rest_s <= 0 and self._may_begin())

    def rested(self, updates: int, seconds: float) -> None:
        """Counts updates that were not reported."""
        self._times.rested(updates)
        if self._rest_s > 0:
            self._with_s += seconds
        self._rest_s -= seconds

    def search_step(self) -> None:
        """Searches the update that ends a step anew, since the script trains something else."""
        self._times.search()
        self.restart()

    def was_busy(self) -> bool:
        """Whether other programs have disturbed the windows."""
        return self._pairs.times.was_busy()

    def restart(self) -> None:
        """Discards the pairs, since an exchange was added or taken back."""
        self._earlier_gain_s = self.gained_s
        self._pairs.restart()
        self._rest_s = self._with_s = 0.0
        self._switch(True)

    def ratio_record(self) -> dict[str, Any] | None:
        """Returns the fields of `SpeedRatio`, without an interval on a busy machine; None without a pair."""
        ratio = self._pairs.ratio()
        if ratio is not None and self.was_busy():
            ratio = replace(ratio, low=None, high=None)
        return None if ratio is None else asdict(ratio)

    def update_ended(self, optimizer: Any) -> None:
        """Records the end of an optimizer's update, which may be the end of a step."""
        step = self._times.update_ended(optimizer, reads_cpu=self._rest_s <= 0)
        if step is None:
            return
        if not self._pairs.is_open and self._races(step):
            return
        if self._rest_s > 0 or self._pairs.is_open_with:
            self._with_s += step.seconds.wall_s
        if self._rest_s > 0:
            self._rest_s -= step.seconds.wall_s
        elif not self._pairs.is_open:
            self._begin_pair()
        elif (window_s := self._pairs.step_ended(step)) is not None:
            self._end_pair(window_s)

    def _begin_pair(self) -> None:
        if self._may_begin():
            self._pairs.begin()

    def _may_begin(self) -> bool:
        most = _FIRST_PAIRS if self._dry_run else _MAX_PAIRS
        return self._pairs.count < most and self._can_begin()

    def _end_pair(self, window_s: float) -> None:
        is_known = self._pairs.count >= _FIRST_PAIRS or self._pairs.is_unlike
        self._switch(not (self._dry_run and is_known))
        if is_known:
            self._rest_s = window_s * _REST_WINDOWS
            self._judge()

    def _drop_pair(self) -> None:
        """Drops a pair whose second window is missing."""
        if self._pairs.is_open:
            self._pairs.drop()
            self._switch(True)

    def _switch(self, enabled: bool) -> None:
        if enabled != self.enabled:
            self.enabled = enabled
            self._switched(enabled)

    def _judge(self) -> None:
        ratio = self._pairs.ratio()
        if (
            ratio is not None and self._pairs.times.most_gain < 1
        ):  # without a sure gain an exchange may not cost anything
            interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
            self._report_slower(f"steps are {ratio.median:.2f} times as fast with it{interval}")
