"""What is noted of loaders: who makes the samples, and which loader a batch came from, at little cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from hotloop.core.records.profile import LoaderUse
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.steps import CLOSE
from hotloop.profiler.hooks import dataloaders as module
from hotloop.profiler.hooks.dataloaders import LoaderRecorder
from hotloop.profiler.session import ProfilerSession
from tests.support.profiler.profiled_steps import watched

COUNT, BATCH = 32, 8


class Single(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, at: Any) -> torch.Tensor:
        return torch.ones(4)


class Many(Single):
    def __getitems__(self, rows: list[int]) -> list[torch.Tensor]:
        return list(torch.ones(len(rows), 4))


class Batches(Single):
    def __getitem__(self, at: Any) -> torch.Tensor:
        return torch.ones(len(at), 4)


def of_batches(data: Dataset) -> DataLoader:
    sampler = BatchSampler(RandomSampler(range(COUNT)), BATCH, drop_last=True)
    return DataLoader(data, sampler=sampler, batch_size=None)


class Sized(BatchSampler):
    """Whose size of a batch is no number of Python's."""

    def __init__(self, size: Any) -> None:
        super().__init__(RandomSampler(range(COUNT)), BATCH, drop_last=True)
        self.batch_size = size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, COUNT, BATCH):
            yield list(range(first, first + BATCH))


def training(loader: DataLoader) -> Callable[[], None]:
    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(20):
            for inputs in loader:
                net(inputs).pow(2).mean().backward()
                optimizer.step()

    return loop


MAKERS = {
    "one by one": (DataLoader(Single(), BATCH), "__getitem__", BATCH, False),
    "many at a call": (DataLoader(Many(), BATCH), "__getitems__", BATCH, True),
    "many, through a subset": (DataLoader(Subset(Many(), range(COUNT)), BATCH), "__getitems__", BATCH, True),
    "a subset of single ones": (DataLoader(Subset(Single(), range(COUNT)), BATCH), "__getitem__", BATCH, False),
    "a chain that asks one by one": (DataLoader(ConcatDataset([Many()]), BATCH), "__getitem__", BATCH, False),
    "whole batches": (of_batches(Batches()), "__getitem__", None, True),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_makes_the_samples_is_known_and_timed(kind: str) -> None:
    loader, makes, batch_size, at_once = MAKERS[kind]
    (use,) = watched(training(loader)).loaders
    assert isinstance(use, LoaderUse) and (use.batch_size, use.at_once) == (batch_size, at_once)
    inner = {"Single": Single, "Many": Many, "Batches": Batches}[use.dataset]
    assert use.sample_where.endswith(f":{getattr(inner, makes).__code__.co_firstlineno}")
    assert use.sample_ms is not None and use.sample_ms > 0


def begun_anew(loader: DataLoader) -> Callable[[], None]:
    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(80):
            inputs = next(iter(loader))
            net(inputs).pow(2).mean().backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize(("begun", "opened"), [(begun_anew, 1.0), (training, BATCH / COUNT)])
def test_how_often_a_loader_begins_anew_is_counted(begun: Callable[[DataLoader], Any], opened: float) -> None:
    (use,) = watched(begun(DataLoader(Single(), BATCH))).loaders
    assert use.opened == pytest.approx(opened, abs=0.15) and (use.draws, use.batches) == (1, COUNT // BATCH)
    assert use.opened_where.startswith("tests/profiler/hooks/test_dataloaders.py:") or use.opened_where.startswith(
        "test_"
    )
    assert use.evaluating_ms == 0


def test_of_loaders_that_are_opened_together_each_is_counted() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    one, other = DataLoader(Single(), BATCH), DataLoader(Many(), BATCH)

    def loop() -> None:
        for _ in range(80):
            inputs, more = next(iter(zip(one, other, strict=True)))
            net(inputs + more).pow(2).mean().backward()
            optimizer.step()

    uses = watched(loop).loaders
    assert len(uses) == 2 and all(use.opened == pytest.approx(1.0, abs=0.15) and use.opening_ms > 0 for use in uses)


def test_what_an_evaluation_draws_is_told_apart() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader, held = DataLoader(Single(), BATCH), DataLoader(Many(), BATCH)

    def loop() -> None:
        for _ in range(20):
            for inputs in loader:
                net(inputs).pow(2).mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for batch in held:
                        net(batch)

    uses = {use.dataset: use for use in watched(loop).loaders}
    assert uses["Many"].evaluating_ms > 0 == uses["Single"].evaluating_ms
    assert (uses["Many"].draws, uses["Single"].draws) == (COUNT // BATCH, 1)


def drawn_from(one: LoaderRecorder, asked: dict[str, Any], rounds: int) -> list[list[str]]:
    """By which loaders each step was fed: the first in each of them, the second in every other."""
    sets = [TensorDataset(torch.ones(count, 4)) for count in (rounds, rounds + 1)]
    first, second = (iter(DataLoader(data)) for data in sets)
    found = []
    for number in range(rounds):
        one.begin(timed=False)
        for iterator in (first, second)[: 1 + number % 2]:
            asked["now"] = iterator
            assert one.batch_drawn(iterator, next(iterator))
        found.append(one.drawn_loaders())
        one.end()
    assert not one.batch_drawn(DataLoader(sets[0]), first), "making an iterator draws nothing"
    return found


def test_a_batch_counts_for_the_loader_that_it_came_from() -> None:
    expected = [["loader 0"], ["loader 0", "loader 1"]] * 2
    assert drawn_from(LoaderRecorder(CallSites()), {}, 4) == expected


def test_a_loader_that_is_taken_for_the_latest_is_seen(monkeypatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(module, "ref", lambda loader: lambda: asked["now"])
    assert drawn_from(LoaderRecorder(CallSites()), asked, 4) == [["loader 0"]] * 4


def lookups(monkeypatch) -> int:
    """How often it is looked up which loader one is, in an epoch of eight batches."""
    calls = []
    known = LoaderRecorder._known
    monkeypatch.setattr(LoaderRecorder, "_known", lambda self, iterator: calls.append(1) or known(self, iterator))
    one = LoaderRecorder(CallSites())
    one.begin(timed=False)
    iterator = iter(DataLoader(TensorDataset(torch.ones(8, 4))))
    for batch in iterator:
        one.batch_drawn(iterator, batch)
    return len(calls)


def test_a_loader_is_looked_up_once(monkeypatch) -> None:
    assert lookups(monkeypatch) == 1


def test_looking_up_each_time_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(module, "ref", lambda loader: lambda: None)
    assert lookups(monkeypatch) == 8


def kinds_counted(monkeypatch) -> set[str]:
    """Kinds of steps whose samples are counted."""
    watches: list[ProfilerSession] = []
    kinds: set[str] = set()
    rows = module._rows

    def counted(batch: Any) -> int | None:
        step = watches[0]._sequence.step if watches else None
        kinds.add(step.kind if step is not None else "early")
        return rows(batch)

    monkeypatch.setattr(module, "_rows", counted)
    profile = watched(training(DataLoader(Single(), BATCH)), observers=lambda watch: watches.append(watch) or [])
    assert profile.samples_per_step == BATCH
    return kinds


def test_samples_are_counted_in_steps_that_are_watched_closely_alone(monkeypatch) -> None:
    kinds = kinds_counted(monkeypatch)
    assert "instrumented" in kinds and kinds <= set(CLOSE)


def test_counting_samples_in_a_clean_step_is_seen(monkeypatch) -> None:
    begin = LoaderRecorder.begin
    monkeypatch.setattr(LoaderRecorder, "begin", lambda self, *, timed, counted=True: begin(self, timed=timed))
    assert "clean" in kinds_counted(monkeypatch)


def test_samples_that_lie_in_a_list_are_no_error() -> None:
    samples = [torch.full((4,), float(number)) for number in range(64)]
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(12):
            for batch in DataLoader(samples, batch_size=8):
                net(batch).square().mean().backward()
                optimizer.step()

    loader = watched(loop, steps=12).loaders[0]
    assert (loader.dataset, loader.sample_ms, loader.batch_size) == ("list", None, 8)


@pytest.mark.parametrize(("size", "told"), [(BATCH, BATCH), (torch.tensor(BATCH), None), ([4, 8], None)])
def test_what_a_sampler_calls_its_batch_size_is_told_if_it_is_a_number(size: Any, told: int | None) -> None:
    profile = watched(training(DataLoader(Single(), batch_sampler=Sized(size))))
    assert profile.loaders[0].batch_size == told and profile.samples_per_step == BATCH


class Held(Single):
    """Keeps what it reads from under a name that torch's own data sets use, too."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.datasets = dataset, iter("ab")


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(COUNT))])
def test_what_a_data_set_of_ones_own_holds_may_be_anything(wrap: Callable[[Dataset], Dataset]) -> None:
    held = Held(np.ones((4, 4)))
    assert watched(training(DataLoader(wrap(held), BATCH))).loaders[0].dataset == "Held"
    assert next(held.datasets) == "a"


class Wrapped:
    """PyTorch Geometric's loaders give an iterator of their own, which has no data set, around torch's."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Wrapped:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


def test_an_iterator_of_a_library_s_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DataLoader._get_iterator
    monkeypatch.setattr(DataLoader, "_get_iterator", lambda self: Wrapped(made(self)))
    (use,) = watched(training(DataLoader(Single(), BATCH))).loaders
    assert use.dataset == "Single"


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(COUNT, 4)


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


class Stacking:
    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)


def begins(function: Any) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno}"


def test_a_stream_makes_its_samples_where_it_is_gone_through() -> None:
    (use,) = watched(training(DataLoader(Stream(), BATCH))).loaders
    assert use.sample_where.endswith(begins(Stream.__iter__)) and use.stream


@pytest.mark.parametrize("theirs", ["torch", "a library"])
def test_samples_of_a_library_have_no_place_in_its_files(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, collate = TensorDataset(torch.ones(COUNT, 4)), lambda samples: torch.stack([one for (one,) in samples])
    if theirs == "a library":
        data, collate = Single(), stacked
        monkeypatch.setattr(module, "is_library", lambda file: True)
    (use,) = watched(training(DataLoader(data, BATCH, collate_fn=collate))).loaders
    assert use.sample_where == (use.where if theirs == "a library" else "") and not use.stream


@pytest.mark.parametrize(
    ("collate", "own"), [(None, None), (stacked, stacked), (partial(stacked), stacked), (Stacking(), Stacking.__call__)]
)
def test_where_batches_are_put_together_is_known_of_ones_own_function(collate: Any, own: Any) -> None:
    (use,) = watched(training(DataLoader(Single(), BATCH, collate_fn=collate))).loaders
    assert use.collate_where.endswith(begins(own)) if own else use.collate_where == ""


def test_a_loader_has_the_share_of_the_steps_that_draw_from_it() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    often, rarely, chance = DataLoader(Single(), 4), DataLoader(Many(), 4), Random(0)

    def loop() -> None:
        for _ in range(8):
            other = iter(rarely)
            for inputs in often:
                inputs = inputs + next(other) if chance.random() < 0.5 else inputs
                net(inputs).pow(2).mean().backward()
                optimizer.step()

    first, second = watched(loop).loaders
    assert (first.dataset, first.share) == ("Single", 1.0) and 0.0 < second.share < 1.0
