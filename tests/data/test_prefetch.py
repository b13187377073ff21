"""One batch ahead: the same batches, errors where they belong; torch's device without memory stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.feeds.prefetch import iterate_ahead, prefetch_to_device
from hotloop.data.order import Order
from hotloop.data.sources import Samples, Source, Table
from hotloop.errors import DataError

META = torch.device("meta")


def told(items: int, log: list[str], fails: bool = False) -> Iterator[int]:
    for number in range(items):
        log.append(f"made {number}")
        yield number
    if fails:
        raise ValueError("no more")


@pytest.mark.parametrize("items", [0, 1, 2, 5])
def test_the_items_are_the_same(items: int) -> None:
    assert list(iterate_ahead(range(items))) == list(range(items))


def test_the_next_item_is_made_before_the_present_one_is_used() -> None:
    log: list[str] = []
    log.extend(f"used {number}" for number in iterate_ahead(told(3, log)))
    assert log == ["made 0", "made 1", "used 0", "made 2", "used 1", "used 2"]


def test_nothing_is_made_before_the_first_is_asked_for() -> None:
    log: list[str] = []
    iterate_ahead(told(3, log))
    assert log == []


def test_an_error_comes_after_the_items_before_it() -> None:
    seen = []
    with pytest.raises(ValueError, match="no more"):
        for number in iterate_ahead(told(3, [], fails=True)):
            seen.append(number)  # noqa: PERF402
    assert seen == [0, 1, 2]


def test_batches_are_moved_with_what_goes_with_them() -> None:
    batches = [(torch.zeros(2), "a"), ({"x": torch.ones(3)}, "b")]
    (first, a), (second, b) = prefetch_to_device(batches, META)
    assert (first.device, second["x"].device, a, b) == (META, META, "a", "b")


class Broken(Dataset):
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.fails_at:
            raise ValueError("no such file")
        return torch.full((2,), float(index)), index


SOURCES: dict[str, Source] = {
    "table": Table((torch.zeros(12, 2), torch.arange(12))),
    "samples": Samples(Broken()),
    "device": Table((torch.zeros(12, 2), torch.arange(12))).to(META),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_feed_for_an_accelerator_gives_the_batches_of_the_order(name: str, start: int) -> None:
    treatment = BatchTransform(META, 0, prepare=lambda x: x * 2)
    feed = open_feed(SOURCES[name], Order(12, 5, 0), treatment)
    for epoch in (0, 1):
        got = [((x.device.type, y.device.type), tuple(x.shape), size) for (x, y), size in feed.epoch(epoch, start)]
        assert got == [(("meta", "meta"), (size, 2), size) for size in [5, 5, 2][start:]]
    feed.close()


def test_a_feed_left_in_the_middle_goes_on_where_it_is_asked_to() -> None:
    """What was loaded ahead and never used must not be missing afterwards."""
    seen: list[list[int]] = []

    def collate(samples: list) -> Any:
        seen.append([number for _, number in samples])
        return torch.stack([x for x, _ in samples])

    order = Order(12, 5, 0)
    feed = open_feed(Samples(Broken(), collate), order, BatchTransform(META, 0))
    next(feed.epoch(0))
    assert len(seen) == 2
    list(feed.epoch(0, 1))
    wanted = [order.batch(order.epoch(0), number).tolist() for number in (0, 1, 1, 2)]
    assert seen[:4] == wanted


def test_a_broken_sample_stops_the_batch_that_it_belongs_to() -> None:
    feed = open_feed(Samples(Broken(7)), Order(12, 5, 0, shuffle=False), BatchTransform(META, 0))
    batches = feed.epoch(0)
    assert next(batches)[1] == 5
    with pytest.raises(DataError, match="in sample 7"):
        next(batches)
