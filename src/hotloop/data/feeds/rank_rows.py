"""Batches for ranks that each take some rows: loaded by row, or as a whole if rows depend on each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.feeds.feed import Feed, SamplesFeed, TableFeed, data_error
from hotloop.data.order import Order, RankRows, rank_bounds
from hotloop.data.row_count import count_rows
from hotloop.data.seeded_dataset import SeededDataset
from hotloop.data.sources import Samples, Source
from hotloop.errors import PlanError

_TRIED_SAMPLES = 8
"""Number of samples; enough that sequences have different lengths."""


@dataclass
class RankRowsFeed:
    """Each rank's rows of each batch, with the number of samples of the whole batch.

    Args:
        feed: feed of the rank's rows.
        order: order of whole batches.
    """

    feed: Feed
    order: Order

    def __post_init__(self) -> None:
        self.batches: int | None = self.order.batches
        self.reseeds = self.feed.reseeds

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        for number, (batch, _) in enumerate(self.feed.epoch(epoch, start), start):
            yield batch, self.order.size(number)

    def close(self) -> None:
        self.feed.close()


@dataclass
class WholeBatchFeed:
    """The same rows out of whole batches, which each rank loads.

    Args:
        feed: feed of whole batches.
        order: order of the rank's rows.
    """

    feed: Feed
    order: RankRows

    def __post_init__(self) -> None:
        self.batches: int | None = self.feed.batches
        self.reseeds = self.feed.reseeds

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        for batch, asked in self.feed.epoch(epoch, start):
            samples = count_rows(batch, asked).number
            first, last = rank_bounds(samples, self.order.rank, self.order.ranks)
            rows = slice(first, last) if first < last else slice(1)
            yield map_tensors(lambda value, rows=rows: value[rows], batch), samples  # type: ignore[misc]

    def close(self) -> None:
        self.feed.close()


def uses_whole_batch(source: Source, order: Order) -> bool:
    """Whether `collate` makes another row of a sample in a batch than of the sample alone, as padding does.

    Reads some samples of the first batch, once each. False if a batch can't be made, or cut into rows.
    """
    if not isinstance(source, Samples) or source.collate is default_collate:
        return False
    numbers = order.batch(order.epoch(0), 0)[:_TRIED_SAMPLES].tolist()
    with preserve_generators():
        try:
            items = SeededDataset(source, order.seed).__getitems__([(0, number) for number in numbers])
            whole = _collate(source, items, order.seed)
        except Exception:  # training raises and reports the same error
            return False
        if non_tensor_parts(whole) or any(not value.ndim or len(value) != len(items) for value in tree_tensors(whole)):
            return False
        try:
            alone = [list(tree_tensors(_collate(source, [item], order.seed))) for item in items]
        except Exception:  # `collate` refuses a single sample
            return True
    rows = zip(*(value.split(1) for value in tree_tensors(whole)), strict=True)
    return not all(map(_is_same, alone, rows))


def non_tensor_parts(batch: Any) -> list[Any]:
    """Returns the parts of a batch other than tensors, which aren't cut with the rows."""
    others: list[Any] = []
    map_tensors(lambda value: value, batch, others.append)
    return [value for value in others if value is not None]


def _collate(source: Samples, items: Sequence[Any], seed: int) -> Any:
    RandomStreams(seed).reseed("look")
    return source.collate(copy.deepcopy(list(items)))  # `collate` may change its samples


def _is_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(some, others, strict=True)
    )


class RandomAccessFeed:
    """Makes the batches of a feed in any order, one at a time, in this process.

    Raises:
        PlanError: the feed is of a stream, which has its own order.
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
        """Returns `(batch, samples)` of batch `number` of an epoch, on the device."""
        feed = self._feed
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, feed.order.epoch(epoch)
        index = feed.order.batch(self._permutation[1], number)
        if isinstance(feed, TableFeed):
            batch = feed.table.take(index.to(feed.table.device))
        else:
            batch = _load_sample(feed, [(epoch, sample) for sample in index.tolist()])
        return feed.treatment(batch, epoch, number, index), len(index)


def _load_sample(feed: SamplesFeed, keys: list[tuple[int, int]]) -> Any:
    try:
        return feed.samples.collate(SeededDataset(feed.samples, feed.treatment.seed).__getitems__(keys))
    except Exception as error:
        raise data_error(error) from error
