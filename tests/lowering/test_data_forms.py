"""A lowered Task trains the same whatever form the data has, in the order that it asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.data.batch_tree import to_device
from hotloop.errors import DataError, TaskError
from hotloop.lowering.task_facts import task_facts
from tests.support.programs import a_task, advance, assert_resumes, labelled, state_after
from tests.support.tasks.random_network import Drawing, network

# --- the order of samples -----------------------------------------------------------------------------------


class Plain(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "float64": lambda x, y: (x.numpy().astype("float64"), y.numpy().astype("int32")),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "list of samples": lambda x, y: list(zip(x, y, strict=True)),
    "TensorDataset": TensorDataset,
    "map-style": Plain,
    "DataLoader of a TensorDataset": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True),
    "DataLoader": lambda x, y: DataLoader(Plain(x, y), batch_size=5, shuffle=True),
    "DataLoader with workers": lambda x, y: DataLoader(Plain(x, y), batch_size=5, shuffle=True, num_workers=2),
}


@pytest.fixture(scope="module")
def from_arrays() -> State:
    return state_after(a_task(model=lambda: network(0.5)), 8)


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_the_same_data_train_the_same(form: str, from_arrays: State) -> None:
    data = FORMS[form](*labelled())
    assert differing_paths(state_after(a_task(model=lambda: network(0.5), data=data), 8), from_arrays) == []


def test_another_order_would_be_seen(from_arrays: State) -> None:
    other = state_after(a_task(model=lambda: network(0.5), shuffle=False), 8)
    assert differing_paths(other, from_arrays) != []


@pytest.mark.more
def test_workers_change_nothing() -> None:
    loader = DataLoader(Drawing(), batch_size=5, shuffle=True, num_workers=2)
    states = [
        state_after(a_task(data=Drawing()), 8),
        state_after(a_task(data=Drawing()), 8, workers=2),
        state_after(a_task(data=loader, batch_size=None), 8),
        state_after(a_task(data=loader, batch_size=None), 8, workers=0),
        state_after(a_task(data=DataLoader(Drawing(), batch_size=5, shuffle=True)), 8, workers=1),
    ]
    assert [differing_paths(state, states[0]) for state in states[1:]] == [[]] * 4


def _masked(samples: list) -> tuple[Tensor, Tensor]:
    """A collate function that draws, as those for masked language models do."""
    x, y = torch.utils.data.default_collate(samples)
    return x * (torch.rand(x.shape) < 0.8) + random.random() + np.random.rand(), y


def test_a_collate_function_may_draw() -> None:
    states = [state_after(a_task(data=Drawing(), collate=_masked), 8, workers=workers) for workers in (0, 2)]
    assert differing_paths(*states) == []
    assert_resumes(a_task(data=Drawing(), collate=_masked))


def test_data_that_draws_resumes_exactly() -> None:
    assert_resumes(a_task(data=Drawing()))
    assert differing_paths(state_after(a_task(data=Drawing()), 5), state_after(a_task(data=labelled()), 5)) != []


def test_a_sample_draws_anew_in_each_epoch() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(batch[0])
        return model(batch[0]).mean()

    advance(hotloop.lower(a_task(step=step, data=Drawing(), batch_size=24, shuffle=False)), 2)
    assert not (seen[0] == seen[1]).any()


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        return model(batch.float().unsqueeze(1)).mean()

    task = a_task(model=lambda: nn.Linear(1, 1), step=step, data=torch.arange(13), batch_size=5)
    advance(hotloop.lower(task), 9)
    assert [len(batch) for batch in seen] == [5, 5, 3] * 3
    epochs = [torch.cat(seen[start : start + 3]) for start in (0, 3, 6)]
    assert all(epoch.sort().values.equal(torch.arange(13)) for epoch in epochs)
    assert not epochs[0].equal(epochs[1]) and not epochs[1].equal(epochs[2])


@pytest.mark.parametrize(
    ("data", "shuffle", "sizes", "in_order"),
    [
        (torch.arange(13), False, [5, 5, 3], True),
        (DataLoader(torch.arange(13), batch_size=5), None, [5, 5, 3], True),
        (DataLoader(torch.arange(13), batch_size=5), True, [5, 5, 3], False),
        (DataLoader(torch.arange(13), batch_size=5, shuffle=True), None, [5, 5, 3], False),
        (DataLoader(torch.arange(13), batch_size=5, drop_last=True), None, [5, 5], True),
    ],
)
def test_shuffling_and_the_last_batch_are_the_loaders(
    data: Any, shuffle: bool | None, sizes: list[int], in_order: bool
) -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        return model(batch.float().unsqueeze(1)).mean()

    program = hotloop.lower(a_task(model=lambda: nn.Linear(1, 1), step=step, data=data, shuffle=shuffle, batch_size=5))
    outcome = program.advance(10)
    assert outcome.ended and [len(batch) for batch in seen] == sizes
    assert outcome.samples == sum(sizes)
    assert torch.cat(seen).equal(torch.arange(sum(sizes))) == in_order


# --- loaders that run as they are ---------------------------------------------------------------------------


class Backwards(Sampler):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class Counting(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(*labelled(), strict=True):
            yield x + random.random() + torch.rand(6), y


class Twice(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield batch


class Batches:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = labelled()
        yield from zip(x.split(5), y.split(5), strict=True)


STREAMS: dict[str, Callable[[], Any]] = {
    "own sampler": lambda: DataLoader(Drawing(), batch_size=5, sampler=Backwards(24)),
    "weighted": lambda: DataLoader(Plain(*labelled()), batch_size=5, sampler=WeightedRandomSampler([1.0, 2] * 12, 24)),
    "with replacement": lambda: DataLoader(
        Plain(*labelled()), batch_size=5, sampler=RandomSampler(range(24), replacement=True)
    ),
    "own generator": lambda: DataLoader(
        Plain(*labelled()), batch_size=5, sampler=WeightedRandomSampler([1.0, 2] * 12, 24, generator=torch.Generator())
    ),
    "own batch sampler": lambda: DataLoader(
        Plain(*labelled()), batch_sampler=_Custom(SequentialSampler(range(24)), 5, drop_last=False)
    ),
    "iterable": Counting,
    "loader of an iterable": lambda: DataLoader(Counting(), batch_size=5),
    "own loader": lambda: Twice(Plain(*labelled()), batch_size=10, shuffle=True),
    "no loader": Batches,
}


class _Custom(BatchSampler):
    pass


@pytest.mark.parametrize("name", STREAMS)
def test_other_loaders_run_as_they_are_and_resume_by_skipping(name: str) -> None:
    data = STREAMS[name]()
    batch_size = None if isinstance(data, DataLoader) else 5
    task = a_task(data=data, batch_size=batch_size)
    assert_resumes(task)
    facts = task_facts(hotloop.lower(task).parts)
    assert not facts.exact and facts.data == "Stream" and facts.samples is None


@pytest.mark.parametrize("data", [labelled(), Drawing(), DataLoader(Drawing(), batch_size=5)])
def test_what_follows_from_the_seed_is_exact(data: Any) -> None:
    assert task_facts(hotloop.lower(a_task(data=data)).parts).exact


def test_the_users_sampler_decides() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        return model(batch.float().unsqueeze(1)).mean()

    loader = DataLoader(torch.arange(7), batch_size=3, sampler=Backwards(7))
    program = hotloop.lower(a_task(model=lambda: nn.Linear(1, 1), step=step, data=loader, batch_size=None))
    assert program.advance(9).ended
    assert [batch.tolist() for batch in seen] == [[6, 5, 4], [3, 2, 1], [0]]


def test_a_new_epoch_is_told_to_the_loaders_parts() -> None:
    told: list[int] = []

    class Told(Counting):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    advance(hotloop.lower(a_task(data=DataLoader(Told(), batch_size=5), batch_size=None)), 10)
    assert told == [0, 1]


def test_data_that_can_be_run_through_only_once_is_told(tmp_path: Path) -> None:
    class Once(IterableDataset):
        def __init__(self) -> None:
            self.samples = iter(list(zip(*labelled(), strict=True)))

        def __iter__(self) -> Iterator[Any]:
            return self.samples

    program = hotloop.lower(a_task(data=Once()))
    advance(program, 5)
    with pytest.raises(DataError, match="epoch 2 of the data has 0 batches"):
        program.advance(6)
        program.end_epoch()
        program.advance(1)


def test_a_schedule_learns_the_length_of_a_loader_that_knows_it() -> None:
    seen = []
    task = a_task(
        data=STREAMS["own sampler"](),
        batch_size=None,
        epochs=4,
        schedule=lambda optimizer, total: seen.append(total) or torch.optim.lr_scheduler.LinearLR(optimizer),
    )
    hotloop.lower(task)
    assert seen == [20]
    with pytest.raises(TaskError, match="unknown length"):
        hotloop.lower(a_task(data=Counting(), schedule=task.schedule))


def test_augmentation_reaches_the_samples_of_a_stream() -> None:
    def noisy(x: Tensor, draws: hotloop.data.Draws) -> Tensor:
        return x + draws.normal(6)

    plain = a_task(data=Batches())
    augmented = replace(plain, augment=noisy)
    assert_resumes(augmented)
    assert differing_paths(state_after(augmented, 3), state_after(plain, 3)) != []


def test_batches_of_other_libraries_move_themselves() -> None:
    class Graphs:
        """As those of torch_geometric: neither a tensor nor a container of them."""

        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

        def to(self, device: torch.device) -> Graphs:
            return Graphs(self.x.to(device), self.y.to(device))

    x, y = labelled()
    batch = Graphs(x, y), nn.utils.rnn.pack_sequence([x, x[:3]])
    graphs, packed = to_device(batch, torch.device("meta"))
    assert graphs.x.device.type == packed.data.device.type == "meta"
    assert packed.batch_sizes.device.type == "cpu"  # where the kernels of recurrent layers want it

    def step(model: nn.Module, batch: Graphs) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    def together(samples: list) -> Graphs:
        return Graphs(*torch.utils.data.default_collate(samples))

    task = a_task(step=step, data=Plain(x, y), collate=together)
    assert differing_paths(assert_resumes(task), state_after(a_task(), 7)) == []
