"""Detection of changes in a data set after it was read into memory; training then uses outdated data."""

from __future__ import annotations

from typing import Any

from hotloop.data.dataset_changes import dataset_summary
from hotloop.data.seeded_dataset import SampleWatch
from hotloop.data.sources import Samples, Table
from hotloop.lowering.context import LoweringContext


class DataChanges:
    """Compares the Task's data set with its state at the last comparison."""

    def __init__(self, parts: LoweringContext) -> None:
        given = parts.task.roles.train
        is_read = isinstance(given, Samples) and isinstance(parts.splits.train, Table)
        self._dataset = given.dataset if is_read and isinstance(given, Samples) else None
        self._samples, self._seed = given, parts.task.seed
        self._watch: SampleWatch | None = None
        self._say = parts.say
        self._summary: tuple[Any, ...] | None = None

    def report(self) -> None:
        """Reports once that the data set has changed since it was read."""
        if self._dataset is None:
            return
        now, is_other = dataset_summary(self._dataset), False
        if self._watch is None and isinstance(self._samples, Samples):
            self._watch = SampleWatch(self._samples, self._seed)
        elif self._watch is not None:
            is_other = self._watch.has_changed()
        if is_other or (self._summary is not None and self._summary != now):
            self._dataset = None
            self._say(
                "the data set has changed since it was read into memory, and training goes on with what was read:"
                " set deterministic=False in the Task, or residency=stream in the plan"
            )
        self._summary = now
