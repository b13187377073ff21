"""Detection of changes in a data set after it was read into memory; training then uses outdated data."""

from __future__ import annotations

import time
from typing import Any

from hotloop.data.dataset_changes import dataset_summary
from hotloop.data.seeded_dataset import SampleWatch
from hotloop.data.sources import Samples, Table
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.object_state.attributes import preserve_attributes

_SHARE = 0.01
"""Largest share of the time that comparisons take, except after callbacks."""


class DataChanges:
    """Compares the Task's data set with its state at the last comparison."""

    def __init__(self, parts: LoweringContext) -> None:
        given = parts.task.roles.train
        is_read = isinstance(given, Samples) and isinstance(parts.splits.train, Table)
        self._dataset = given.dataset if is_read and isinstance(given, Samples) else None
        self._samples, self._task = given, parts.task
        self._watch: SampleWatch | None = None
        self._say = parts.say
        self._summary: tuple[Any, ...] | None = None
        self._next_s = 0.0  # of time.perf_counter()

    def begin(self) -> None:
        """Records the data set before the first step; only the first call has an effect."""
        if self._summary is None:
            self.report()

    def report_seldom(self) -> None:
        """Reports a change as `report` does, as often as the share of the time allows."""
        if self._dataset is not None and time.perf_counter() >= self._next_s:
            self.report()

    def report(self) -> None:
        """Reports once that the data set has changed since it was read."""
        if self._dataset is None:
            return
        began, is_other = time.perf_counter(), False
        now = dataset_summary(self._dataset)
        with preserve_attributes(self._task):  # a data set may count its reads
            if self._watch is None and isinstance(self._samples, Samples):
                self._watch = SampleWatch(self._samples, self._task.seed)
            elif self._watch is not None:
                is_other = self._watch.has_changed()
        if is_other or (self._summary is not None and self._summary != now):
            self._dataset = None
            self._say(
                "the data set has changed since it was read into memory, and training goes on with what was read:"
                " set deterministic=False in the Task, or residency=stream in the plan"
            )
        self._summary = now
        ended = time.perf_counter()
        self._next_s = ended + (ended - began) / _SHARE
