"""Small data in forms that a Task takes, and what arrives of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.splits import DataSplits, split_data

X = torch.arange(40.0).reshape(20, 2)
Y = torch.arange(20) % 3


def roles(data: Any, validation: Any = None, test: Any = None, **fields: Any) -> DataSplits:
    return split_data(data, validation, test, **dict(batch_size=None, seed=0, prepare=None, collate=None) | fields)


def arrived(given: DataSplits, epoch: int = 0, **treatment: Any) -> list[Any]:
    """The batches of one training epoch."""
    feed = open_feed(
        given.train, given.order, BatchTransform(torch.device("cpu"), given.seed, given.prepare, **treatment), workers=0
    )
    return [batch for batch, _ in feed.epoch(epoch)]


class Pairs(Dataset):
    """A map-style data set of `(x, y)`."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


class Endless(IterableDataset):
    """Ten samples `(x, y)`, in an order of their own."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return iter((X[index], int(Y[index])) for index in range(10))
