"""Single batches of the Task's order by their place in it, for whoever doesn't run through an epoch from its beginning."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotloop.data.feed import Feed, SamplesFeed, TableFeed, of_data
from hotloop.data.seeded import Seeded
from hotloop.errors import PlanError


class Positions:
    """Makes the same batches as a feed that runs through, here and one at a time.

    Raises:
        PlanError: the feed is of a stream, whose order is its own.
    """

    def __init__(self, feed: Feed) -> None:
        if not isinstance(feed, TableFeed | SamplesFeed):
            raise PlanError(
                "data that has an order of its own can't be handed out batch by batch",
                expected="arrays or a map-style data set, whose order is the Task's",
                fix="use parallel=none",
            )
        self._feed = feed
        self._permutation: tuple[int, Tensor] | None = None

    def at(self, epoch: int, number: int) -> tuple[Any, int]:
        """`(batch, samples)` of batch `number` of an epoch, on the device."""
        feed = self._feed
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, feed.order.epoch(epoch)
        index = feed.order.batch(self._permutation[1], number)
        if isinstance(feed, TableFeed):
            batch = feed.table.take(index.to(feed.table.device))
        else:
            batch = _loaded(feed, [(epoch, sample) for sample in index.tolist()])
        return feed.treatment(batch, epoch, number, index), len(index)


def _loaded(feed: SamplesFeed, keys: list[tuple[int, int]]) -> Any:
    try:
        return feed.samples.collate(Seeded(feed.samples, feed.treatment.seed).__getitems__(keys))
    except Exception as error:
        raise of_data(error) from error
