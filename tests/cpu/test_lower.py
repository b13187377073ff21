"""A lowered Task does what a plain PyTorch loop does, bit for bit, whatever form the data has."""

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
from hotloop.data.tree import to_device
from hotloop.errors import DataError, TaskError
from hotloop.lowering.facts import facts_of
from hotloop.rng import Streams
from hotloop.state import State, differences
from tests.cpu.programs import (
    a_task,
    advance,
    assert_resumes,
    labelled,
    last_state,
    state_after,
    through_file,
    trained,
)


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def assert_same_bits(model: nn.Module, state: State) -> None:
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = state.parameters | state.buffers
    assert values.keys() == expected.keys()
    assert [name for name, value in values.items() if not value.equal(expected[name])] == []


# --- a loop of one's own ------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "groups": lambda parameters: torch.optim.RMSprop(
        [{"params": list(parameters)[:2], "lr": 0.01}, {"params": list(parameters)[2:], "lr": 0.001}]
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_on_batches_of_the_callers_are_those_of_a_plain_loop(optimizer: str) -> None:
    task = a_task(model=network, optimizer=OPTIMIZERS[optimizer])
    program = hotloop.lower(task)

    model = network()
    model.load_state_dict(program.model.state_dict())
    plain = OPTIMIZERS[optimizer](list(model.parameters()))
    x, y = labelled()
    model.train()
    for start in range(0, 20, 4):
        batch = x[start : start + 4], y[start : start + 4]
        loss = program.step(batch)
        plain.zero_grad()
        expected = nn.functional.cross_entropy(model(batch[0]), batch[1])
        expected.backward()
        plain.step()
        assert loss.shape == () and not loss.requires_grad
        assert loss.equal(expected.detach())
    assert_same_bits(model, program.state())
    for name, value in model.named_parameters():
        saved = program.state().optimizer["state"][name]
        kept = {key: item for key, item in plain.state[value].items() if item is not None}
        assert all(item.equal(saved[key]) for key, item in kept.items())


def test_steps_of_ones_own_can_be_stopped_and_gone_on_with() -> None:
    x, y = labelled()
    task = a_task(model=lambda: network(0.5), optimizer=OPTIMIZERS["adamw"], average=0.9)
    whole, first, second = (hotloop.lower(task) for _ in range(3))
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4)]
    for batch in batches:
        whole.step(batch)
    for batch in batches[:3]:
        first.step(batch)
    second.restore(through_file(first.state()))
    for batch in batches[3:]:
        second.step(batch)
    assert differences(whole.state(), second.state()) == []


def test_the_end_of_an_epoch_is_told_by_the_caller() -> None:
    step_lr = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    program = hotloop.lower(a_task(schedule=step_lr, schedule_every="epoch"))
    program.step(labelled())
    assert program.read_sums()["samples"] == 24
    assert program.optimizer.param_groups[0]["lr"] == 0.1
    program.end_epoch()
    assert program.optimizer.param_groups[0]["lr"] == 0.05
    assert program.read_sums()["samples"] == 0
    assert (program.position.step, program.position.epoch, program.position.batch) == (1, 1, 0)


def test_a_plateau_schedule_wants_the_figure_that_it_watches() -> None:
    program = hotloop.lower(a_task(schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)))
    program.step(labelled())
    with pytest.raises(TaskError, match="without a figure"):
        program.end_epoch()


# --- the whole of fit ---------------------------------------------------------------------------------------


def plain_training(
    task: hotloop.Task, epochs: int, *, draws: bool = False
) -> tuple[nn.Module, dict[str, Tensor], list[float]]:
    """The loop of a textbook for a task made by `recipe`: the model, its averaged weights, the epochs' losses."""
    model = network(0.5 if draws else 0.0)
    model.load_state_dict(task.build_model().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=epochs * 5)
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    x, y = labelled()
    losses, step = [], 0
    for epoch in range(epochs):
        assert task.roles.order is not None
        order = task.roles.order.epoch(epoch)
        total = torch.zeros((), dtype=torch.float64)
        for index in order.split(5):
            if draws:
                Streams(task.seed).reseed("step", step, 0)
            model.train()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for name, value in model.named_parameters():
                    average[name].lerp_(value, 1 - 0.9)
            total += loss.detach().double() * len(index)
            step += 1
        losses.append(float(total) / len(x))
    return model, average, losses


def recipe(*, draws: bool = False, **fields: Any) -> hotloop.Task:
    return a_task(
        model=lambda: network(0.5 if draws else 0.0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total),
        clip_norm=0.5,
        clip_value=0.1,
        average=0.9,
        epochs=3,
        **fields,
    )


@pytest.mark.parametrize("draws", [False, True], ids=["no draws", "dropout"])
def test_fit_is_a_plain_loop(draws: bool, tmp_path: Path) -> None:
    task = recipe(draws=draws, seed=3)
    run = trained(task, tmp_path / "run")
    model, average, losses = plain_training(task, 3, draws=draws)
    state = last_state(run)
    assert_same_bits(model, state)
    assert [name for name, value in average.items() if not value.equal(state.average[name])] == []
    assert [row["train_loss"] for row in run.epochs] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("part", ["clip_norm", "clip_value", "schedule", "average"])
def test_the_comparison_with_a_plain_loop_sees_what_is_missing(part: str, tmp_path: Path) -> None:
    state = last_state(trained(replace(recipe(), **{part: None}), tmp_path / "run"))
    model, average, _ = plain_training(recipe(), 3)
    same = all(value.equal(state.parameters[name]) for name, value in model.named_parameters())
    if part == "average":
        assert average and not state.average
    else:
        assert not same


def test_an_interrupted_fit_ends_in_the_same_state(tmp_path: Path) -> None:
    task = recipe(draws=True, validation=6)
    whole = last_state(trained(task, tmp_path / "whole"))

    def stop(view: hotloop.View) -> None:
        if view.event == "checkpoint" and view.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(task, tmp_path / "broken", checkpoint_every="3", callbacks=[stop])
    run = trained(task, tmp_path / "broken", resume=True)
    assert [event["event"] for event in run.journal()].count("resume") == 1
    assert differences(last_state(run), whole) == []


def test_the_model_is_built_from_the_seed_alone() -> None:
    starts = []
    for before in (1, 2):
        torch.manual_seed(before)
        random.seed(before)
        starts.append(state_after(a_task(model=network), 0))
    assert differences(*starts) == []
    assert differences(starts[0], state_after(a_task(model=network, seed=1), 0)) != []


def test_draws_differ_from_step_to_step_and_are_equal_in_two_runs() -> None:
    seen: list[Tensor] = []

    class Watched(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.detach() != 0)
            return out

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.ones_like(batch[0])).square().mean()

    task = a_task(model=lambda: nn.Sequential(Watched(0.5), nn.Linear(6, 3)), step=step, data=labelled(25))
    for _ in range(2):
        advance(hotloop.lower(task), 5)
    first, second = seen[:5], seen[5:]
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert not any(a.equal(b) for place, a in enumerate(first) for b in first[:place])


# --- the caller's random numbers ----------------------------------------------------------------------------


class Drawing(Dataset):
    """Samples with noise from all three generators."""

    def __init__(self, count: int = 24) -> None:
        self.x, self.y = labelled(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(6)
        return self.x[index] + noise, self.y[index]


def _loop(task: hotloop.Task, path: Path) -> None:
    program = hotloop.lower(task)
    for _ in range(3):
        program.step(labelled())


@pytest.mark.parametrize("data", [labelled(), Drawing()], ids=["arrays", "drawing data set"])
@pytest.mark.parametrize(
    "use", [lambda task, path: hotloop.lower(task), _loop, trained], ids=["lower", "own loop", "fit"]
)
def test_the_callers_generators_are_left_alone(use: Callable, data: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    expected = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    use(a_task(model=lambda: network(0.5), data=data, validation=4), tmp_path / "run")
    assert (torch.rand(()), random.random(), np.random.rand()) == expected


# --- the order of samples -----------------------------------------------------------------------------------


class Plain(Dataset):
    """A map-style data set over the same arrays."""

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
    assert differences(state_after(a_task(model=lambda: network(0.5), data=data), 8), from_arrays) == []


def test_another_order_would_be_seen(from_arrays: State) -> None:
    other = state_after(a_task(model=lambda: network(0.5), shuffle=False), 8)
    assert differences(other, from_arrays) != []


def test_workers_change_nothing() -> None:
    loader = DataLoader(Drawing(), batch_size=5, shuffle=True, num_workers=2)
    states = [
        state_after(a_task(data=Drawing()), 8),
        state_after(a_task(data=Drawing()), 8, workers=2),
        state_after(a_task(data=loader, batch_size=None), 8),
        state_after(a_task(data=loader, batch_size=None), 8, workers=0),
        state_after(a_task(data=DataLoader(Drawing(), batch_size=5, shuffle=True)), 8, workers=1),
    ]
    assert [differences(state, states[0]) for state in states[1:]] == [[]] * 4


def _masked(samples: list) -> tuple[Tensor, Tensor]:
    """A collate function that draws, as those for masked language models do."""
    x, y = torch.utils.data.default_collate(samples)
    return x * (torch.rand(x.shape) < 0.8) + random.random() + np.random.rand(), y


def test_a_collate_function_may_draw() -> None:
    states = [state_after(a_task(data=Drawing(), collate=_masked), 8, workers=workers) for workers in (0, 2)]
    assert differences(*states) == []
    assert_resumes(a_task(data=Drawing(), collate=_masked))


def test_data_that_draws_resumes_exactly() -> None:
    assert_resumes(a_task(data=Drawing()))
    assert differences(state_after(a_task(data=Drawing()), 5), state_after(a_task(data=labelled()), 5)) != []


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
    """Gives samples with noise, in order."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(*labelled(), strict=True):
            yield x + random.random() + torch.rand(6), y


class Twice(DataLoader):
    """A loader that does something of its own."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield batch


class Batches:
    """No DataLoader at all: whatever can be run through again and again."""

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
    facts = facts_of(hotloop.lower(task).parts)
    assert not facts.exact and facts.data == "Stream" and facts.samples is None


@pytest.mark.parametrize("data", [labelled(), Drawing(), DataLoader(Drawing(), batch_size=5)])
def test_what_follows_from_the_seed_is_exact(data: Any) -> None:
    assert facts_of(hotloop.lower(a_task(data=data)).parts).exact


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
    assert differences(state_after(augmented, 3), state_after(plain, 3)) != []


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
    assert differences(assert_resumes(task), state_after(a_task(), 7)) == []
