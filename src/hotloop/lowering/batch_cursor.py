"""The batches of a training run from its current position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from hotloop.core.state import Position
from hotloop.data.feeds.batches import RowBatches
from hotloop.data.feeds.feed import Feed, TableFeed
from hotloop.distributed.watchdog import RANK_PROGRESS
from hotloop.lowering.checks.batch_rows import BatchChecks
from hotloop.lowering.eager_step import EagerStep


class BatchCursor:
    """Opens the feed at the position of training; each call continues until `reset`."""

    def __init__(self, step: EagerStep, checks: BatchChecks) -> None:
        self._step, self._checks = step, checks
        self._batches: Iterator[tuple[Any, int]] | None = None

    @property
    def is_open(self) -> bool:
        return self._batches is not None

    def take(self, feed: Feed, position: Position, steps: int) -> Iterator[tuple[Any, int]]:
        """Returns up to `steps` checked batches of the position's epoch."""
        if self._batches is None:
            self._batches = self._open(feed, position)
            self._step.row_arrays = _row_arrays(feed)
        taken: Iterator[Any] = (
            self._batches.take(steps) if isinstance(self._batches, RowBatches) else islice(self._batches, steps)
        )
        if not self._step.parts.world.is_single:
            taken = _record_batches(taken, position.step)
        return self._checks.check_while_passing(taken, position.step) if self._checks.is_needed else taken

    def reset(self) -> None:
        """Closes the feed. The next `take` reopens the feed, and repeats batches that weren't used for training."""
        self._batches = None

    def _open(self, feed: Feed, position: Position) -> Iterator[tuple[Any, int]]:
        if self._step.cuts_batches and not self._checks.is_needed and isinstance(feed, TableFeed) and feed.is_untouched:
            return feed.row_batches(position.epoch, position.batch)
        return feed.epoch(position.epoch, position.batch)


def _record_batches(batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[Any, int]]:
    for number, batch in enumerate(batches, step + 1):
        RANK_PROGRESS.begin_step(number)
        yield batch


def _row_arrays(feed: Feed) -> Any:
    """Returns the arrays whose rows are the batches; None if batches are transformed or on another device."""
    if isinstance(feed, TableFeed) and feed.is_untouched and feed.treatment.device.type == "cpu":
        return feed.table.columns
    return None
