"""The Task's order: complete, by seed and epoch alone, the same from any position and with any number of workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.order import Order, split_positions
from hotloop.data.sources import Samples, Table
from hotloop.errors import DataError

SEEDS = st.integers(-(2**63), 2**63 - 1)
ORDERS = st.tuples(st.integers(1, 300), st.integers(1, 300), SEEDS, st.booleans(), st.booleans()).map(
    lambda given: Order(given[0], min(given[:2]), *given[2:])
)
CPU = torch.device("cpu")


def batches(order: Order, epoch: int) -> list[list[int]]:
    permutation = order.epoch(epoch)
    return [order.batch(permutation, number).tolist() for number in range(order.batches)]


@given(ORDERS, st.integers(0, 10**9))
def test_an_epoch_has_every_sample_once(order: Order, epoch: int) -> None:
    numbers = order.epoch(epoch)
    assert numbers.dtype == torch.int64
    assert sorted(numbers.tolist()) == list(range(order.samples))


@given(ORDERS, st.integers(0, 10**9))
def test_the_batches_are_the_epoch_cut_into_pieces(order: Order, epoch: int) -> None:
    pieces = batches(order, epoch)
    seen = [number for piece in pieces for number in piece]
    assert {len(piece) for piece in pieces[:-1]} <= {order.batch_size}
    assert 1 <= len(pieces[-1]) <= order.batch_size
    left = order.samples % order.batch_size
    assert len(seen) == order.samples - (left if order.drop_last else 0)
    assert seen == order.epoch(epoch).tolist()[: len(seen)]


@given(ORDERS, st.integers(0, 1000), st.integers(0, 1000))
def test_it_follows_from_seed_and_epoch_alone(order: Order, epoch: int, other: int) -> None:
    expected = order.epoch(epoch)
    torch.rand(3)
    order.epoch(other)
    assert order.epoch(epoch).equal(expected)
    another_size = Order(order.samples, 1, order.seed, order.shuffle, not order.drop_last)
    assert another_size.epoch(epoch).equal(expected)


@given(SEEDS, st.integers(0, 1000))
def test_other_epochs_and_other_seeds_have_another_order(seed: int, epoch: int) -> None:
    order = Order(1000, 10, seed)
    other_seed = Order(1000, 10, seed + 1 if seed < 0 else seed - 1)
    orders = [order.epoch(epoch), order.epoch(epoch + 1), other_seed.epoch(epoch)]
    assert len({tuple(one.tolist()) for one in orders}) == 3


def test_every_place_is_equally_likely_for_every_sample() -> None:
    """Chi-square over where sample 0 of 10 comes, in 5000 epochs: 9 degrees of freedom, 99.99 % quantile 33.7."""
    order = Order(10, 1, seed=3)
    places = torch.stack([order.epoch(epoch) for epoch in range(5000)]).argsort(1)[:, 0].bincount(minlength=10)
    assert ((places - 500) ** 2 / 500).sum() < 33.7


def test_without_shuffle_it_is_the_order_of_the_data() -> None:
    assert batches(Order(5, 2, seed=1, shuffle=False), epoch=7) == [[0, 1], [2, 3], [4]]
    assert batches(Order(5, 2, seed=1, shuffle=False, drop_last=True), epoch=7) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_a_sample(size: int) -> None:
    with pytest.raises(DataError, match=rf"batch_size={size}; expected 1 or more"):
        Order(5, size, seed=0)


def test_a_batch_is_no_larger_than_the_data() -> None:
    with pytest.raises(DataError, match=r"batch_size=6 is larger than the data \(5 samples\); expected at most 5"):
        Order(5, 6, seed=0)
    assert Order(5, 5, seed=0).batches == 1


# --- splitting validation data off


@given(st.data(), st.integers(2, 500), SEEDS)
def test_a_split_shares_no_sample_and_loses_none(data: st.DataObject, samples: int, seed: int) -> None:
    number = data.draw(st.integers(1, samples - 1))
    training, held_out = split_positions(samples, number, seed)
    assert len(held_out) == number
    assert sorted(training.tolist() + held_out.tolist()) == list(range(samples))
    assert training.tolist() == sorted(training.tolist()) and held_out.tolist() == sorted(held_out.tolist())


@given(st.integers(20, 500), st.floats(0.05, 0.95), SEEDS)
def test_a_share_is_that_share_of_the_samples(samples: int, share: float, seed: int) -> None:
    _, held_out = split_positions(samples, share, seed)
    assert abs(len(held_out) - samples * share) <= 0.5


def test_a_split_is_drawn_by_seed() -> None:
    assert split_positions(100, 0.2, 1)[1].equal(split_positions(100, 0.2, 1)[1])
    assert not split_positions(100, 0.2, 1)[1].equal(split_positions(100, 0.2, 2)[1])
    torch.manual_seed(0)
    first = split_positions(100, 20, 1)[1]
    torch.manual_seed(1)
    assert split_positions(100, 20, 1)[1].equal(first)


def test_a_split_has_nothing_to_do_with_the_order_of_training() -> None:
    """Held-out samples that were simply the first of epoch 0 would be a stream used twice."""
    assert sorted(Order(1000, 1, seed=5).epoch(0)[:100].tolist()) != split_positions(1000, 100, 5)[1].tolist()


@pytest.mark.parametrize("share", [0, 0.0, 1.0, 10, 11, -1, -0.5, 1.5, 0.01, 0.99])
def test_a_split_leaves_some_for_both(share: float) -> None:
    with pytest.raises(DataError, match=rf"validation={share} of 10 samples; expected a share .* from 1 to 9"):
        split_positions(10, share, seed=0)


# --- the order as data arrive in it


class Numbers(Dataset):
    """Sample i is the number i, or what is drawn for it."""

    def __init__(self, samples: int, *, draw: bool = False) -> None:
        self.samples, self.draw = samples, draw

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) if self.draw else torch.tensor(index)


def feeds(order: Order) -> dict[str, object]:
    treatment = BatchTransform(CPU, order.seed)
    table = Table(torch.arange(order.samples))
    samples = Samples(Numbers(order.samples))
    return {
        "table": open_feed(table, order, treatment),
        "samples": open_feed(samples, order, treatment, workers=0),
        "one epoch": open_feed(samples, order, treatment, workers=0, endless=False),
    }


@pytest.mark.parametrize("form", ["table", "samples", "one epoch"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_arrive_in_the_tasks_order(form: str, drop_last: bool) -> None:
    order = Order(11, 4, seed=2, drop_last=drop_last)
    feed = feeds(order)[form]
    assert feed.batches == (2 if drop_last else 3)
    for epoch in (0, 1, 2):
        arrived = [(batch.tolist(), size) for batch, size in feed.epoch(epoch)]
        assert arrived == [(piece, len(piece)) for piece in batches(order, epoch)]


@pytest.mark.few("table")
@pytest.mark.parametrize("form", ["table", "samples", "one epoch"])
@given(epoch=st.integers(0, 5), start=st.integers(0, 3), seed=SEEDS)
def test_an_epoch_can_be_entered_anywhere(form: str, epoch: int, start: int, seed: int) -> None:
    order = Order(11, 4, seed)
    whole = [batch.tolist() for batch, _ in feeds(order)[form].epoch(epoch)]
    assert [batch.tolist() for batch, _ in feeds(order)[form].epoch(epoch, start)] == whole[start:]


@pytest.mark.parametrize("draw", [False, True], ids=["order", "draws"])
def test_workers_change_neither_order_nor_draws_and_start_once(draw: bool) -> None:
    order, treatment = Order(23, 5, seed=8), BatchTransform(CPU, 8)
    seen = {}
    for workers in (0, 1, 2):
        feed = open_feed(Samples(Numbers(23, draw=draw)), order, treatment, workers=workers)
        seen[workers] = [batch.tolist() for epoch in (0, 1) for batch, _ in feed.epoch(epoch)]
        feed.close()
    assert seen[0] == seen[1] == seen[2]
    assert not draw or seen[0][0] != seen[0][5]  # another epoch draws anew


def test_what_a_sample_draws_depends_on_neither_batch_nor_order() -> None:
    def drawn(order: Order, epoch: int) -> dict[int, float]:
        feed = open_feed(Samples(Numbers(12, draw=True)), order, BatchTransform(CPU, 4), workers=0)
        values = torch.cat([batch for batch, _ in feed.epoch(epoch)]).tolist()
        return dict(zip(order.epoch(epoch).tolist(), values, strict=True))

    shuffled, plain = Order(12, 5, seed=4), Order(12, 3, seed=4, shuffle=False)
    assert drawn(shuffled, 1) == drawn(plain, 1)
    assert drawn(shuffled, 1) != drawn(shuffled, 2)
    assert len(set(drawn(shuffled, 1).values())) == 12
