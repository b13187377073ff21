"""Which part of the data trains, steers and is read at the end, what prepares it, and errors on its way."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hotloop
from hotloop.data.bundle import Bundle
from hotloop.data.feeds.feed import BatchTransform, first_batch, open_feed
from hotloop.data.order import Order
from hotloop.data.sources import Samples, Table
from hotloop.errors import DataError, TaskError
from hotloop.lowering.build import lower
from hotloop.lowering.evaluation import evaluate
from tests.support.tasks.sample_data import Endless, Pairs, X, Y, arrived, roles

# --- roles


def test_a_share_of_validation_is_split_off_by_seed() -> None:
    given = roles((X, Y), 0.25)
    train, held_out = given.train.columns[0][:, 0], given.validation.columns[0][:, 0]
    assert (len(train), len(held_out)) == (15, 5)
    assert sorted(train.tolist() + held_out.tolist()) == X[:, 0].tolist()
    assert roles((X, Y), 0.25).validation.columns[0].equal(given.validation.columns[0])
    assert not roles((X, Y), 0.25, seed=1).validation.columns[0].equal(given.validation.columns[0])
    assert len(roles((X, Y), 4).validation) == 4


def test_the_same_samples_are_split_off_a_data_set_as_off_arrays() -> None:
    one, other = roles(Pairs(), 0.25), roles((X, Y), 0.25)
    assert [int(one.validation.dataset[number][0][0]) for number in range(5)] == other.validation.columns[0][
        :, 0
    ].int().tolist()
    assert len(one.train) == 15


def test_a_share_of_a_stream_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"validation=0.1 asks for a share of data that has an order of its own.* Give validation"
    ):
        roles(Endless(), 0.1)
    assert isinstance(roles(Endless(), (X, Y)).validation, Table)


def a_bundle(**fields: Any) -> Bundle:
    given = dict(
        name="small", train=(X, Y), validation=(X[:6], Y[:6]), test=(X[:3], Y[:3]), classes=("a", "b", "c"),
        prepare=lambda x: x + 100, note="made up",
    )  # fmt: skip
    return Bundle(**given | fields)


def test_a_bundle_brings_validation_test_prepare_classes_and_a_note() -> None:
    given = roles(a_bundle())
    assert (len(given.train), len(given.validation), len(given.test)) == (20, 6, 3)
    assert (given.classes, given.note) == (("a", "b", "c"), "made up")
    assert given.train.columns[0].equal(X + 100) and given.test.columns[0].equal(X[:3] + 100)


def test_what_the_task_says_goes_before_what_the_bundle_says() -> None:
    given = roles(a_bundle(), (X[:2], Y[:2]), (X[:1], Y[:1]), prepare=lambda x: x - 1)
    assert (len(given.validation), len(given.test)) == (2, 1)
    assert given.train.columns[0].equal(X - 1)
    assert len(roles(a_bundle(), 5).validation) == 5 and len(roles(a_bundle(), 5).train) == 15
    without = roles(a_bundle(validation=None, test=None))
    assert without.validation is None and without.test is None


# --- prepare and augment


class Counted:
    """A `prepare` that notes how many samples it saw in each call."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x * 2


def test_prepare_is_applied_once_to_arrays_in_memory() -> None:
    prepare = Counted()
    given = roles((X, Y), (X[:5], Y[:5]), (X[:3], Y[:3]), prepare=prepare, batch_size=5)
    assert sorted(prepare.seen) == [1, 1, 5, 20]  # each part in one piece, after a look at one sample
    for epoch in range(3):
        for batch, plain in zip(arrived(given, epoch), arrived(roles((X, Y), batch_size=5), epoch), strict=True):
            assert batch[0].equal(plain[0] * 2) and batch[1].equal(plain[1])
    assert len(prepare.seen) == 4
    assert given.test.columns[0].equal(X[:3] * 2) and sorted(prepare.seen) == [1, 1, 1, 3, 5, 20]


def test_large_arrays_are_prepared_in_pieces() -> None:
    prepare = Counted()
    given = roles((torch.zeros(10_000, 2), torch.zeros(10_000)), prepare=prepare)
    assert len(given.train) == 10_000 and sum(prepare.seen) == 10_001 and max(prepare.seen) < 10_000


def test_where_memory_is_short_each_batch_is_prepared_on_its_way(monkeypatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * X.nbytes))
    prepare = Counted()
    given = roles((X, Y), prepare=prepare, batch_size=5)
    assert prepare.seen == [1] and not given.train.is_prepared
    for _ in range(2):
        for batch, plain in zip(arrived(given), arrived(roles((X, Y), batch_size=5)), strict=True):
            assert batch[0].equal(plain[0] * 2)
    assert prepare.seen == [1] + [5] * 8
    assert first_batch(given)[0].equal(X[:2] * 2)


def test_a_data_set_is_prepared_batch_by_batch() -> None:
    prepare = Counted()
    given = roles(Pairs(), prepare=prepare, batch_size=5)
    assert prepare.seen == []
    assert arrived(given)[0][0].equal(X[given.order.epoch(0)[:5]] * 2)
    assert prepare.seen == [5] * 4


def test_prepare_of_several_inputs_gets_them_all() -> None:
    def swap(inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[1], inputs[0]

    first, second, target = roles((X, X + 1, Y), prepare=swap).train.columns
    assert first.equal(X + 1) and second.equal(X) and target.equal(Y)


@pytest.mark.parametrize("data", [(X, Y), Pairs()], ids=["arrays", "samples"])
def test_augment_sees_training_batches_after_prepare_and_nothing_else(data: Any) -> None:
    seen: list[torch.Tensor] = []

    def augment(x: torch.Tensor, draws: hotloop.data.Draws) -> torch.Tensor:
        seen.append(x)
        return -x

    task = hotloop.Task(
        model=lambda: nn.Linear(2, 3), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        data=data, validation=(X + 1000, Y), batch_size=5, prepare=lambda x: x + 0.5, augment=augment,
    )  # fmt: skip
    batches = arrived(task.roles, augment=augment) if not isinstance(data, tuple) else None
    program = lower(task)
    seen.clear()
    program.advance(4)
    assert sorted(torch.cat(seen)[:, 0].tolist()) == (X[:, 0] + 0.5).tolist()
    seen.clear()
    evaluate(program, task.roles.validation)
    assert seen == []
    assert batches is None or batches[0][0].equal(-(X[task.roles.order.epoch(0)[:5]] + 0.5))


def test_what_a_look_at_the_data_gives_has_no_effect_and_no_augmentation() -> None:
    given = roles((X, Y), prepare=lambda x: x * 2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert first_batch(given)[0].equal(X[:2] * 2) and first_batch(given, 3)[1].equal(Y[:3])
    assert torch.get_rng_state().equal(before)
    assert [len(part) for part in first_batch(roles(DataLoader(Pairs(), batch_size=5)))] == [2, 2]


@pytest.mark.parametrize(
    ("prepare", "says", "kind"),
    [
        (lambda x: x.reshape(7), "prepare raised RuntimeError: shape '.7.' is invalid", TaskError),
        (lambda x: x.mean(), r"prepare turned a batch of 1 sample into a tensor of shape \(\)", DataError),
        (lambda x: x.flatten(), r"prepare turned a batch of 1 sample into a tensor of shape \(2,\)", DataError),
        (lambda x: x / 0, r"data\[0\] has NaN or infinity after prepare in 20 of 20 samples", DataError),
    ],
)
def test_a_prepare_that_cannot_be_right(prepare: Any, says: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=says):
        roles((X, Y), prepare=prepare)


@pytest.mark.parametrize("data", [Pairs(), Endless()], ids=["samples", "stream"])
def test_a_prepare_that_raises_on_its_way_is_named(data: Any) -> None:
    given = roles(data, prepare=lambda x: x.reshape(7), batch_size=5)
    with pytest.raises(TaskError, match=r"prepare raised RuntimeError: .* \(test_splits.py:\d+\)\. Correct that line"):
        arrived(given)


# --- errors of the data set


class Broken(Pairs):
    """Sample 7 can't be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            raise ValueError("two\nlines")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_is_shown_with_line_and_sample(workers: int) -> None:
    feed = open_feed(Samples(Broken()), Order(20, 4, 0), BatchTransform(torch.device("cpu"), 0), workers=workers)
    with pytest.raises(
        DataError,
        match=r"^the data set raised ValueError: two \(test_splits.py:\d+\) in sample 7\. Correct the data set",
    ):
        list(feed.epoch(0))
    feed.close()


def test_a_stream_that_raises_is_shown_with_its_line() -> None:
    class Torn(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield X[0], 0
            raise OSError("the connection was lost")

    given = roles(Torn(), batch_size=1)
    with pytest.raises(
        DataError, match=r"^the data set raised OSError: the connection was lost \(test_splits.py:\d+\)"
    ):
        arrived(given)


def test_an_error_leaves_no_worker_behind() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    feed = open_feed(Samples(Broken()), Order(20, 4, 0), BatchTransform(torch.device("cpu"), 0), workers=2)
    with pytest.raises(DataError) as kept:  # holding the error holds its frames, and they the loader
        list(feed.epoch(0))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert kept.value.__cause__ is not None


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset"), EOFError(), RuntimeError("DataLoader worker (pid 7) died")]
)
def test_a_worker_that_is_gone_is_told_as_such(error: Exception) -> None:
    """Which of these torch raises depends on what it was fetching when the worker died."""

    class Gone:
        def _try_get_data(self) -> None:
            raise error

        def __next__(self) -> None:
            self._try_get_data()

    feed = open_feed(Samples(Pairs()), Order(20, 4, 0), BatchTransform(torch.device("cpu"), 0), workers=0)
    batches = feed.epoch(0)
    next(batches)
    feed._batches = Gone()
    with pytest.raises(DataError, match=r"^a worker process that loads the data died; expected .* --workers 0"):
        next(batches)


def test_a_lost_connection_of_the_data_sets_own_is_its_own() -> None:
    class Remote(Pairs):
        def __getitem__(self, index: int) -> Any:
            raise ConnectionResetError(104, "the server hung up")

    for workers in (0, 1):
        feed = open_feed(Samples(Remote()), Order(20, 4, 0), BatchTransform(torch.device("cpu"), 0), workers=workers)
        with pytest.raises(
            DataError, match=r"^the data set raised ConnectionResetError: .*hung up \(test_splits.py:\d+\) in sample"
        ):
            next(feed.epoch(0))
