"""Data that can't be read into memory as it is trained on is refused, and it is said why."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

import hotloop
from hotloop.data.batch_difference import batch_difference
from hotloop.data.feeds.in_memory import MAX_REQUESTS
from hotloop.data.sources import Samples, Table
from hotloop.errors import DataError, PlanError, TaskError
from hotloop.lowering.transforms import residency
from hotloop.plan import Plan
from tests.support.programs import a_task, labelled
from tests.support.tasks.in_memory_datasets import Pairs, reading

X, Y = labelled()


class Own:
    """Noise from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, index: int, x: Tensor) -> Tensor:
        return x + float(self.generator.random())


class Counter:
    def __init__(self, period: int = 1) -> None:
        self.period, self.calls = period, 0

    def __call__(self, index: int, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls // self.period


RANDOM: dict[str, tuple[Callable[[int, Tensor], Any], str]] = {
    "python": (lambda index, x: x * random.random(), "sample 0 draws from Python's"),
    "numpy": (lambda index, x: x * float(np.random.standard_normal()), "sample 0 draws from NumPy's"),
    "torch": (lambda index, x: x + torch.rand(6), "sample 0 draws from torch's"),
    "drawn for nothing": (lambda index, x: (torch.rand(1), x)[1], "sample 0 draws from torch's"),
    "one of them": (lambda index, x: x + torch.rand(6) if index == 17 else x, "sample 17 draws from torch's"),
    "own generator": (Own(np.random.default_rng()), r"sample 0 draws from the random generator data\.then\.generator"),
    "system": (Own(random.SystemRandom()), "sample 23 differs when it is read again"),
    "counter": (Counter(), "sample 23 differs when it is read again"),
    "counter of epochs": (Counter(24), r"sample \d+ differs when it is read again"),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_data_is_refused_naming_the_first_sample_that_differed(name: str) -> None:
    then, says = RANDOM[name]
    with pytest.raises(PlanError, match=f"data can't be read into memory: its {says}.*residency='stream'"):
        hotloop.lower(a_task(data=Pairs(then=then)), Plan(residency="host"))


def test_a_collate_that_draws_is_refused() -> None:
    def masked(samples: list) -> Any:
        x, y = default_collate(samples)
        return x * (torch.rand(x.shape) < 0.5), y

    with pytest.raises(PlanError, match="sample 0 draws from torch's"):
        hotloop.lower(a_task(data=Pairs(), collate=masked), Plan(residency="host"))


def test_draws_are_found_where_workers_make_them() -> None:
    with pytest.raises(PlanError, match="sample 0 draws from NumPy's"):
        hotloop.lower(a_task(data=Pairs(then=RANDOM["numpy"][0])), Plan(residency="host", workers=2))


def test_samples_are_asked_all_over_the_data_and_no_more_than_needed() -> None:
    count, seen = 10 * MAX_REQUESTS, []
    data = Pairs(count, then=lambda index, x: (seen.append(index), x)[1])
    with pytest.raises(PlanError, match="more than half of"):
        reading(data, free_bytes=1)
    asked = set(seen[: 2 * MAX_REQUESTS])
    assert len(asked) == MAX_REQUESTS and {0, count - 1} < asked
    assert max(b - a for a, b in zip(sorted(asked), sorted(asked)[1:], strict=False)) <= 11


def test_the_user_may_say_that_data_is_deterministic_or_not() -> None:
    frozen = a_task(data=Pairs(then=lambda index, x: x + torch.rand(6)), deterministic=True)
    table = hotloop.lower(frozen, Plan(residency="host")).parts.splits.train
    assert isinstance(table, Table) and not table.columns[0].equal(X)
    with pytest.raises(PlanError, match="deterministic=False"):
        hotloop.lower(a_task(data=Pairs(), deterministic=False), Plan(residency="host"))
    with pytest.raises(TaskError, match=r"deterministic='yes'; expected True, False"):
        a_task(deterministic="yes")


def test_data_said_to_be_deterministic_is_still_compared_with_what_was_read() -> None:
    with pytest.raises(PlanError, match=r"differ from their batch: batch\[0\] holds other values"):
        reading(Pairs(then=Own(random.SystemRandom())), deterministic=True)
    late: list[int] = []
    data = Pairs(then=lambda index, x: x + len(late))
    with pytest.raises(PlanError, match=r"differs: batch\[0\] holds other values"):
        reading(data, progress=lambda done, samples: late.append(1) if done == samples else None)


def padded(samples: list) -> Any:
    rows, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


def longest_first(samples: list) -> Any:
    return default_collate(sorted(samples, key=lambda sample: -float(sample[0][0])))


def with_places(samples: list) -> Any:
    x, y = default_collate(samples)
    return x, torch.arange(len(x)), y


def halved(samples: list) -> Any:
    x, y = default_collate(samples)
    return x / len(samples), y


def with_length(samples: list) -> Any:
    return *default_collate(samples), torch.arange(7)


def channels_last(samples: list) -> Any:
    x, y = default_collate(samples)
    return x.reshape(-1, 2, 3, 1).contiguous(memory_format=torch.channels_last), y


UNCUT: dict[str, tuple[Any, Callable | None, str]] = {
    "lengths": (Pairs(then=lambda index, x: x[: 1 + index % 6]), padded, r"in sample 0 .*\(1,\), in sample 1 .*\(2,\)"),
    "dtypes": (Pairs(then=lambda index, x: x.double() if index == 3 else x), None, r"float32.*in sample 3 .*float64"),
    "sorted": (Pairs(), longest_first, "holds other values"),
    "places": (Pairs(), with_places, r"batch\[1\] holds other values"),
    "mean": (Pairs(), halved, r"batch\[0\] holds other values"),
    "more": (Pairs(), with_length, r"batch\[2\] has shape \(7,\), which is no row for each"),
    "strides": (Pairs(), channels_last, r"batch\[0\] has strides"),
    "text": (Pairs(then=lambda index, x: "text"), None, r"batch\[0\]\[0\] is a str and no tensor"),
    "arrays": (Pairs(), lambda samples: np.stack([x for x, _ in samples]), "batch is a ndarray and no tensor"),
    "fails alone": (
        Pairs(),
        lambda samples: default_collate(samples[:-1]),
        "collate raised IndexError.* sample 0 alone",
    ),
}


@pytest.mark.parametrize("name", UNCUT)
def test_batches_that_are_not_their_samples_put_together_are_refused(name: str) -> None:
    data, collate, says = UNCUT[name]
    with pytest.raises(PlanError, match=f"data can't be read into memory: .*{says}"):
        hotloop.lower(a_task(data=data, collate=collate), Plan(residency="host"))


def test_a_length_that_none_of_the_asked_samples_has_is_found_while_reading() -> None:
    count = 4 * MAX_REQUESTS
    data = Samples(Pairs(count, then=lambda index, x: x[:4] if index == 2 else x[:3]), padded)
    with pytest.raises(PlanError, match=r"batch from sample 0 on batch\[0\] is float32 of shape \(4,\)"):
        reading(data)


def test_what_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "device_free_bytes", lambda device: 1500)
    data = Pairs()
    with pytest.raises(PlanError, match=r"takes about 0.0 MB, more than half of the 0.0 MB free"):
        hotloop.lower(a_task(data=data), Plan(residency="host"))
    monkeypatch.setattr(residency, "device_free_bytes", lambda device: 24 * (6 * 4 + 8) * 2)
    assert isinstance(hotloop.lower(a_task(data=data), Plan(residency="host")).parts.splits.train, Table)


def test_data_with_an_order_of_its_own_is_refused() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    for name in ("host", "device"):
        with pytest.raises(
            PlanError, match=f"residency={name} can't be run here: the data is a stream with an order of its own"
        ):
            hotloop.lower(a_task(data=Endless()), Plan(residency=name))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    def broken(index: int, x: Tensor) -> Tensor:
        if index == 13:
            raise ValueError("no such file")
        return x

    with pytest.raises(DataError, match=r"the data set raised ValueError: no such file \(.*\) in sample 13"):
        hotloop.lower(a_task(data=Pairs(then=broken)), Plan(residency="host", workers=workers))


def test_a_difference_of_one_bit_or_of_a_container_is_seen() -> None:
    zero = torch.zeros(3, 2), torch.ones(3)
    assert batch_difference(zero, (torch.zeros(3, 2), torch.ones(3))) == ""
    nans = torch.full((3,), float("nan"))
    assert batch_difference((nans,), (nans.clone(),)) == ""
    assert batch_difference(zero, (-torch.zeros(3, 2), torch.ones(3))) == "batch[0] holds other values"
    assert "containers" in batch_difference(zero, list(zero))
    assert batch_difference({"a": zero[0]}, {"b": zero[0]}) != ""
    assert batch_difference({"a": "x"}, {"a": "x"}) == "" != batch_difference({"a": "x"}, {"a": "y"})
    assert batch_difference((1,), (1.0,)) != "", "a number of another type"
