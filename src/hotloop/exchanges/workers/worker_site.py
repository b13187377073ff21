"""One data set whose batches workers may fetch: times of its batches, its part, and the race."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.exchanges.part import CallComparison, Part
from hotloop.exchanges.sample_table import describe_dataset
from hotloop.exchanges.windows.paired_times import Seconds
from hotloop.exchanges.windows.step_times import TimedStep
from hotloop.exchanges.windows.window_pairs import WindowPairs, is_over
from hotloop.exchanges.workers.worker_limits import difference, why_short_of_memory, why_unfit_batch, why_unfit_process

MakePart = Callable[[str, str, Sequence[str]], Part]

_TIMED_BATCHES = 8
"""Batches after which the share of the fetch in the time of a batch is known."""

_MIN_FETCH_S, _MIN_SHARE = 1e-3, 0.2
"""Least seconds of a fetch, and least share of the time of a batch, for which workers are tried."""

_MIN_PASS_S = 2.0
"""Least seconds of all fetches of a pass of the loader: each pass starts its workers anew, in about 0.05 s."""

_WARM_UP_BATCHES = 2
"""Batches after a switch that the race leaves out, besides the first one of each window: workers begin or finish."""

_MIN_TIMEOUT_S, _TIMEOUT_FETCHES = 10.0, 20
"""Seconds, and multiples of a fetch's time, after which a worker that hangs is ended."""

_MAX_CHANGES = 3
"""Changes of the data set within a pass, after each of which new workers start."""


class WorkerSite:
    """The facts of one data set.

    Attributes:
        part: None until the fetch is known to be slow.
        is_fast: whether the fetch is too fast for workers.
        uses_workers: whether the race's present window has workers.
        workers: number of processes of a pass.
        timeout_s: most seconds that the script waits for a worker's batch.

    Args:
        dataset: the script's.
        batches: number of batches of a pass.
        make_part: creates a part of kind, name and exchanges.
        ended: is called when the data set is freed.
    """

    def __init__(self, dataset: Any, batches: int, make_part: MakePart, ended: Callable[[Any], Any]) -> None:
        self.dataset, self._batches, self._make_part = ref(dataset, ended), batches, make_part
        self.part: Part | None = None
        self.is_fast = self.uses_workers = False
        self.workers, self.timeout_s = 0, _MIN_TIMEOUT_S
        self._times: list[tuple[float, float]] = []
        self._pairs = WindowPairs(self._switch)
        self._skipped = self._changes = self._batch_bytes = 0
        self._has_raced = False

    @property
    def is_tried(self) -> bool:
        """Whether the data set's batches are timed, or fetched by workers."""
        return not self.is_fast and (self.part is None or self.part.stage != "off")

    def leave(self, reason: str) -> None:
        """Leaves all batches to the script's own process from now on."""
        assert self.part is not None
        if self.part.stage == "use":
            self.part.take_back(reason)
        elif self.part.stage != "off":
            self.part.refuse(reason)

    def begin_pass(self) -> None:
        """Notes that a pass of the loader begins, with cold workers."""
        self._skipped = 0

    def note_change(self) -> None:
        """Notes that the script changed the data set within a pass."""
        self._changes += 1
        if self._changes > _MAX_CHANGES:
            self.leave("the script changes the data set while it is read")

    def note_batch(self, batch: Any) -> None:
        """Notes the size of a batch that the script's own process has fetched."""
        self._batch_bytes = sum(value.nbytes for value in tree_tensors(batch))
        if self.part is None and why_unfit_batch(batch):
            self.is_fast = True  # without a part, since its batches can not be compared

    def end_batch(self, batch_s: float, fetch_s: float | None) -> None:
        """Adds a batch's time to the race, or to what is known before.

        Args:
            batch_s: seconds since the batch before.
            fetch_s: seconds of its fetch in the script's own process; None if unknown.
        """
        if self.part is None and fetch_s is not None and not self.is_fast:
            self._times.append((batch_s, fetch_s))
            if len(self._times) >= _TIMED_BATCHES:
                self._choose()
        elif self.part is not None and self.part.stage == "race":
            self._race(batch_s)

    def has_raced(self) -> bool:
        """Returns whether a race has used a batch since the last call."""
        found, self._has_raced = self._has_raced, False
        return found

    def deliver(self, batch: Any, own: Callable[[], Any]) -> Any:
        """Returns a worker's batch as ordinary tensors, or the script's own after a comparison."""
        part = self.part
        assert part is not None
        if part.stage == "race":
            return _copy(batch)
        return part.call(own, lambda: _copy(batch), lambda: _compare(own, batch), enabled=True)

    def _choose(self) -> None:
        """Makes a part if the fetch takes much of the time."""
        times, self._times = self._times, []
        batch_s, fetch_s = (statistics.median(column) for column in zip(*times, strict=True))
        if fetch_s < max(_MIN_FETCH_S, _MIN_SHARE * batch_s):
            self.is_fast = True
            return
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.workers = min(cores, math.ceil(fetch_s / max(batch_s - fetch_s, 1e-2 * fetch_s)))
        self.timeout_s = max(_MIN_TIMEOUT_S, _TIMEOUT_FETCHES * fetch_s)
        name = "1 process fetches ahead" if self.workers == 1 else f"{self.workers} processes fetch ahead"
        self.part = self._make_part("workers", describe_dataset(self.dataset()), [name])
        why = why_unfit_process() or why_short_of_memory(self.workers, self._batch_bytes)
        if not why and self._batches * fetch_s < _MIN_PASS_S:
            why = f"all its batches take {self._batches * fetch_s:.2g} s, too little to start processes"
        if why:
            self.part.refuse(why)

    def _race(self, batch_s: float) -> None:
        self._has_raced = True
        if self._skipped < _WARM_UP_BATCHES:
            self._skipped += 1
        elif not self._pairs.is_open:
            self._pairs.begin()
        elif self._pairs.step_ended(TimedStep(Seconds(batch_s))) is not None and is_over(self._pairs):
            assert self.part is not None
            self.part.decide(self._pairs.times)

    def _switch(self, uses_workers: bool) -> None:
        self.uses_workers, self._skipped = uses_workers, 0


def _copy(batch: Any) -> Any:
    """Copies a batch out of the memory that workers share."""
    return map_tensors(Tensor.clone, batch)


def _compare(own: Callable[[], Any], batch: Any) -> tuple[Any, CallComparison]:
    """Returns the batch of the script's own process, and whether the worker's has the same bits."""
    mine = own()
    wrong = difference(mine, batch)
    numbers = sum(value.numel() for value in tree_tensors(mine))
    return mine, CallComparison(not wrong, numbers, wrong and f"a worker's batch differs: {wrong}")
