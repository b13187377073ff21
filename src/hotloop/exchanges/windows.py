"""Windows of a script's own steps with and without all exchanges, which give the gain of the whole run.

The steps are found from the updates of the script's optimizers, after which torch calls a hook.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hotloop.core.torch_private import next_sequence_number
from hotloop.exchanges.races import Seconds, TimedStep, WindowPairs, read_clocks
from hotloop.profiler.base.steps import Finder, TrainingEvent, is_end
from hotloop.profiler.base.transparency import hide_from_compiler

_UNTIMED_UPDATES = 16
"""Updates of a resting hook between two readings of the clock, unless they take long."""

_LONG_S = 0.01

_LOST_UPDATES = 100
"""Updates of other optimizers after which the step's end is searched anew."""

_FIRST_PAIRS = 12
"""Pairs of windows that follow each other; later pairs are rare."""

_REST_WINDOWS = 200
"""After the first pairs, one window in so many runs without exchanges (0.5 % of the time)."""

_MAX_PAIRS = 400

_NO_OTHERS = frozenset[tuple[int, int]]()


class UpdateHook:
    """The hook of one session; a resting hook counts updates, which takes a tenth of a microsecond.

    Args:
        ended: receives the optimizer after its update.
    """

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._handle: RemovableHandle | None = None
        self._hook = hide_from_compiler(self._make_hook())
        self.begin_full()

    def begin_full(self) -> None:
        """Calls the function after each update from now on."""
        self._left = self._skipped = 0
        self._until_s = self._began_s = self._timed_s = 0.0

    def install(self) -> None:
        if self._handle is None:
            self.begin_full()
            self._handle = register_optimizer_step_post_hook(self._hook)

    def remove(self) -> None:
        """Removes the hook from torch's table, or leaves an empty function there if torch iterates over later hooks."""
        if self._handle is None:
            return
        table, key = torch_optimizer._global_optimizer_post_hooks, self._handle.id
        if key in table and next(reversed(table)) == key:
            del table[key]
        elif key in table:
            table[key] = _nothing
        self._handle = None

    def rest(self, seconds: float) -> None:
        """Counts updates for a time, instead of calling the function."""
        self._began_s = self._timed_s = time.monotonic()
        self._until_s = self._began_s + seconds

    def rested(self) -> tuple[int, float]:
        """Returns number and seconds of the updates that the hook has only counted since the last call."""
        counted, self._skipped = self._skipped - self._left, self._left
        now_s = time.monotonic()
        seconds, self._began_s = now_s - self._began_s, now_s
        return counted, seconds if counted else 0.0

    def _make_hook(self) -> Callable[[Any, Any, Any], None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._left:
                self._left -= 1
            elif not self._until_s or self._is_over():
                self._ended(optimizer)

        return hook

    def _is_over(self) -> bool:
        """Whether the rest is over; else decides after how many updates this is asked again."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._until_s = 0.0
            return True
        self._skipped += 1
        if now_s - self._timed_s < _LONG_S:
            self._left = _UNTIMED_UPDATES - 1
            self._skipped += self._left
        self._timed_s = now_s
        return False


def _nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Stands in torch's table for a hook that is over."""


class StepTimes:
    """Finds the optimizer whose update ends a step.

    Attributes:
        steps: number of steps so far.

    Args:
        lost: is called when another optimizer has taken over.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self.steps = 0
        self._lost = lost
        self._finder, self._numbers = Finder(), WeakKeyDictionary[Any, int]()
        self._anchor: TrainingEvent | None = None
        self._anchored: ref[Any] | None = None
        self._others = Counter[int]()
        self._updates = 0
        self._last: tuple[Seconds, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the update that ends a step is known."""
        return self._anchor is not None

    def rested(self, updates: int) -> None:
        """Counts the steps of updates that were not reported; the length of the step that ends next is unknown."""
        self.steps += round(updates * self.steps / self._updates) if self._updates else 0
        self._updates += updates
        self._last, self._others = None, Counter()

    def search(self) -> None:
        """Searches the update that ends a step anew."""
        self._anchor, self._finder, self._last, self._others = None, Finder(), None, Counter()
        self._anchored = None

    def update_ended(self, optimizer: Any, *, reads_cpu: bool = True) -> TimedStep | None:
        """Returns the step that ends with this update; None within a step, and for the first step."""
        if (
            self._anchored is None or self._anchored() is not optimizer
        ):  # else the usual end of a step, in a third of the time
            number = self._numbers.setdefault(optimizer, len(self._numbers))
            event = TrainingEvent("update", "", number)
            if self._anchor is None:
                self._finder.record(event)
                self._anchor = self._finder.anchor()
                return None
            if not is_end(self._anchor, event):
                self._updates += 1
                self._others[number] += 1
                if self._others.total() > _LOST_UPDATES:
                    self.search()
                    self._lost()
                return None
            self._anchored = ref(optimizer)
        self._updates += 1
        others = _NO_OTHERS
        if self._others:
            others, self._others = frozenset(self._others.items()), Counter()
        self.steps += 1
        last, self._last = self._last, (read_clocks(reads_cpu=reads_cpu), next_sequence_number())
        if last is None:
            return None
        return TimedStep(self._last[0].since(last[0]), (others, self._last[1] - last[1]))


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
        ratio = self._pairs.times.ratio()
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
        ratio = self._pairs.times.ratio()
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
            if self._may_begin():
                self._pairs.begin()
        elif (window_s := self._pairs.step_ended(step)) is not None:
            self._end_pair(window_s)

    def _may_begin(self) -> bool:
        most = _FIRST_PAIRS if self._dry_run else _MAX_PAIRS
        return self._pairs.times.count < most and self._can_begin()

    def _end_pair(self, window_s: float) -> None:
        times = self._pairs.times
        is_known = times.count >= _FIRST_PAIRS or self._pairs.is_unlike
        self._switch(not (self._dry_run and is_known))
        if not is_known:
            return
        self._rest_s = window_s * _REST_WINDOWS
        ratio = times.ratio()
        if ratio is not None and times.most_gain < 1:  # without a sure gain an exchange may not cost anything
            interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
            self._report_slower(f"steps are {ratio.median:.2f} times as fast with it{interval}")

    def _drop_pair(self) -> None:
        """Drops a pair whose second window is missing."""
        if self._pairs.is_open:
            self._pairs.drop()
            self._switch(True)

    def _switch(self, enabled: bool) -> None:
        if enabled != self.enabled:
            self.enabled = enabled
            self._switched(enabled)
