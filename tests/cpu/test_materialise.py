"""A data set read into memory trains bit by bit as it does sample by sample, or is refused with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

import hotloop
from hotloop.data.feed import Treatment, open_feed
from hotloop.data.materialise import ASKED, Reading, difference, materialise
from hotloop.data.order import Order
from hotloop.data.source import Samples, Table
from hotloop.errors import DataError, PlanError, TaskError
from hotloop.lowering import residency, telling
from hotloop.lowering.facts import facts_of
from hotloop.lowering.ingredients import Ingredients, placed
from hotloop.plan import Plan
from hotloop.rng import generator_states
from hotloop.state import State, differences
from tests.cpu.killing import train
from tests.cpu.programs import a_task, advance, labelled, last_state

X, Y = labelled()


class Pairs(Dataset):
    """`(x, y)` as tensor and int; counts how often it is asked, and can be made to do something at each request."""

    def __init__(self, count: int = 24, then: Callable[[int, Tensor], Any] = lambda index, x: x) -> None:
        self.x, self.y = labelled(count)
        self.then, self.asked = then, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.asked += 1
        return self.then(index, self.x[index]), int(self.y[index])


class Named(Pairs):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y, "pair": (x[:2], np.float64(y))}


class Arrays(Pairs):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x.numpy()[::-1].copy(), np.int64(y)


def named_step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) + batch["pair"][0].mean() * 0


def reading(samples: Any, **fields: Any) -> Table:
    given = samples if isinstance(samples, Samples) else Samples(samples)
    return materialise(given, Reading("data", Order(len(given), min(5, len(given)), 0), **fields))


def after(task: hotloop.Task, residency: str, *, steps: int = 12, workers: int = 0) -> State:
    program = hotloop.lower(task, Plan(residency=residency, workers=workers))
    program.seed_all()
    assert isinstance(program.parts.roles.train, Table if residency != "stream" else Samples)
    advance(program, steps)
    program.close()
    return program.state()


# --- the same training --------------------------------------------------------------------------------------


def _noisy(x: Tensor, draws: hotloop.data.Draws) -> Tensor:
    return x + draws.normal(6) + torch.rand(6)


TASKS: dict[str, dict[str, Any]] = {
    "tuples": dict(data=Pairs()),
    "dicts": dict(data=Named(), step=named_step),
    "arrays": dict(data=Arrays()),
    "subset": dict(data=Subset(Pairs(40), range(3, 40, 2))),
    "split": dict(data=Pairs(), validation=0.25),
    "loader": dict(data=DataLoader(Pairs(), batch_size=5, shuffle=True, drop_last=True)),
    "in order": dict(data=Pairs(), shuffle=False),
    "prepare": dict(data=Pairs(), prepare=lambda x: (x - 0.3) / 1.7),
    "prepare over the batch": dict(data=Pairs(), prepare=lambda x: x - x.mean(0)),
    "augment": dict(data=Pairs(), augment=_noisy),
    "both": dict(data=Pairs(), prepare=lambda x: x * 3, augment=_noisy),
    "random layers": dict(
        data=Pairs(), model=lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.Linear(9, 3))
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_data_set_in_memory_trains_as_one_that_is_loaded_sample_by_sample(name: str) -> None:
    task = a_task(**TASKS[name])
    streamed = after(task, "stream")
    assert differences(after(task, "host"), streamed) == []
    assert differences(after(task, "device"), streamed) == []  # a CPU's device memory is the host's


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_the_same(workers: int) -> None:
    data = DataLoader(Pairs(), batch_size=5, shuffle=True, num_workers=2)
    assert differences(after(a_task(data=data), "host", workers=workers), after(a_task(data=data), "stream")) == []


def test_validation_and_its_figures_are_the_same(tmp_path: Path) -> None:
    """The learning rate follows the validation loss, so a difference in its last bit would reach the State."""

    def once(residency: str) -> hotloop.Run:
        task = a_task(
            data=Pairs(200),
            validation=Pairs(77),
            epochs=3,
            schedule=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        )
        return hotloop.fit(task, plan=Plan(residency=residency), run=tmp_path / residency, device="cpu", progress=False)

    one, other = once("stream"), once("host")
    figures = ("validation_loss", "validation_accuracy")
    assert [[row[name] for name in figures] for row in one.epochs] == [
        [row[name] for name in figures] for row in other.epochs
    ]
    assert differences(last_state(one), last_state(other)) == []
    assert one.record.facts == other.record.facts


def test_a_run_goes_on_under_another_residency() -> None:
    task = a_task(data=Pairs(), augment=_noisy)
    whole = after(task, "stream")
    for first, second in [("stream", "host"), ("host", "stream")]:
        program = hotloop.lower(task, Plan(residency=second))
        program.seed_all()
        program.restore(after(task, first, steps=7))
        advance(program, 5)
        assert differences(program.state(), whole) == []


def test_a_killed_run_goes_on_under_another_residency(tmp_path: Path) -> None:
    def run(residency: str, name: str, until: int | None = None) -> None:
        task = a_task(data=Pairs(), validation=Pairs(9), epochs=4)
        train(tmp_path / name, task, until=until, plan=Plan(residency=residency))

    run("stream", "whole")
    run("stream", "killed", 9)
    run("host", "killed", 14)
    run("stream", "killed")
    whole, killed = hotloop.Run.open(tmp_path / "whole"), hotloop.Run.open(tmp_path / "killed")
    assert [event["event"] for event in killed.journal()].count("resume") == 2
    assert differences(last_state(whole), last_state(killed)) == []


# --- read once, and said ------------------------------------------------------------------------------------


def test_what_was_read_is_said_once_and_read_once() -> None:
    data, lines = Pairs(), []
    task = a_task(data=data, validation=Pairs(9), loss=nn.CrossEntropyLoss())
    first = hotloop.lower(task, Plan(residency="host"), lines.append)
    assert [line.split(" (")[0] for line in lines] == [
        "read 24 samples of data into memory",
        "read 9 samples of validation into memory",
    ]
    assert first.parts.notes == tuple(lines)
    asked = data.asked
    again = hotloop.lower(task, Plan(residency="host"), lines.append)
    advance(again, 12)
    assert data.asked <= asked + 2 and len(lines) == 2  # two for a look at their shapes
    assert again.parts.roles.train is first.parts.roles.train


def test_progress_is_told_while_reading() -> None:
    told: list[tuple[int, int]] = []
    reading(Pairs(12), progress=lambda done, samples: told.append((done, samples)))
    assert list(dict.fromkeys(told)) == [(0, 12), (5, 12), (10, 12), (12, 12)]  # the first while it asks some


def test_long_reading_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_SAY_EVERY_S", 0.0)
    lines: list[str] = []
    hotloop.lower(a_task(data=Pairs()), Plan(residency="host"), lines.append)
    assert "reading data into memory: 20 of 24 samples" in lines


def test_facts_are_the_tasks_whatever_the_plan() -> None:
    task = a_task(data=Pairs())
    streamed, held = (facts_of(hotloop.lower(task, Plan(residency=name)).parts) for name in ("stream", "host"))
    assert streamed == held and held.data == "Samples"


def test_the_callers_generators_stay_as_they_are() -> None:
    before = generator_states()
    hotloop.lower(a_task(data=Pairs()), Plan(residency="host"))
    with pytest.raises(PlanError):
        hotloop.lower(a_task(data=Pairs(then=lambda index, x: x + torch.rand(6))), Plan(residency="host"))
    assert generator_states() == before


def test_arrays_are_in_memory_already() -> None:
    task = a_task()
    program = hotloop.lower(task, Plan(residency="host"))
    assert program.parts.roles.train is task.roles.train and program.parts.notes == ()


def test_other_validation_data_stays_as_it_is_and_that_is_said() -> None:
    lines: list[str] = []
    drawing = Pairs(9, then=lambda index, x: x + torch.rand(6))
    program = hotloop.lower(a_task(data=Pairs(), validation=drawing), Plan(residency="host"), lines.append)
    assert isinstance(program.parts.roles.validation, Samples)
    assert lines[1] == (
        "validation can't be read into memory: its sample 0 draws from torch's random generator; "
        "it is loaded sample by sample"
    )
    asked = drawing.asked
    hotloop.lower(program.parts.task, Plan(residency="host"), lines.append)
    assert drawing.asked == asked


# --- refused ------------------------------------------------------------------------------------------------


class Own:
    """Noise from a generator that no seed reaches."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

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
    "own generator": (Own(), "sample 23 is another one when asked for again"),
    "counter": (Counter(), "sample 23 is another one when asked for again"),
    "counter of epochs": (Counter(24), r"sample \d+ is another one when asked for again"),
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
    count, seen = 10 * ASKED, []
    data = Pairs(count, then=lambda index, x: (seen.append(index), x)[1])
    with pytest.raises(PlanError, match="more than half of"):
        reading(data, free_bytes=1)
    asked = set(seen[: 2 * ASKED])
    assert len(asked) == ASKED and {0, count - 1} < asked
    assert max(b - a for a, b in zip(sorted(asked), sorted(asked)[1:], strict=False)) <= 11


def test_the_user_may_say_that_data_is_deterministic_or_not() -> None:
    frozen = a_task(data=Pairs(then=lambda index, x: x + torch.rand(6)), deterministic=True)
    table = hotloop.lower(frozen, Plan(residency="host")).parts.roles.train
    assert isinstance(table, Table) and not table.columns[0].equal(X)
    with pytest.raises(PlanError, match="deterministic=False"):
        hotloop.lower(a_task(data=Pairs(), deterministic=False), Plan(residency="host"))
    with pytest.raises(TaskError, match=r"deterministic='yes'; expected True, False"):
        a_task(deterministic="yes")


def test_data_said_to_be_deterministic_is_still_compared_with_what_was_read() -> None:
    with pytest.raises(PlanError, match=r"put together are not their batch: batch\[0\] holds other values"):
        reading(Pairs(then=Own()), deterministic=True)
    late: list[int] = []
    data = Pairs(then=lambda index, x: x + len(late))
    with pytest.raises(PlanError, match=r"came out otherwise: batch\[0\] holds other values"):
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
    count = 4 * ASKED
    data = Samples(Pairs(count, then=lambda index, x: x[:4] if index == 2 else x[:3]), padded)
    with pytest.raises(PlanError, match=r"batch from sample 0 on batch\[0\] is float32 of shape \(4,\)"):
        reading(data)


def test_what_does_not_fit_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "free_memory", lambda device: 1500)
    data = Pairs()
    with pytest.raises(PlanError, match=r"takes about 0.0 MB, more than half of the 0.0 MB free"):
        hotloop.lower(a_task(data=data), Plan(residency="host"))
    monkeypatch.setattr(residency, "free_memory", lambda device: 24 * (6 * 4 + 8) * 2)
    assert isinstance(hotloop.lower(a_task(data=data), Plan(residency="host")).parts.roles.train, Table)


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
    assert difference(zero, (torch.zeros(3, 2), torch.ones(3))) == ""
    nans = torch.full((3,), float("nan"))
    assert difference((nans,), (nans.clone(),)) == ""
    assert difference(zero, (-torch.zeros(3, 2), torch.ones(3))) == "batch[0] holds other values"
    assert "containers" in difference(zero, list(zero))
    assert difference({"a": zero[0]}, {"b": zero[0]}) != ""


# --- on the device ------------------------------------------------------------------------------------------


def on_meta(monkeypatch: pytest.MonkeyPatch, task: hotloop.Task, free: int) -> Any:
    """The ingredients under residency=device on torch's device without memory, which takes part in all but values."""
    monkeypatch.setattr(residency, "free_memory", lambda device: None if device.type == "cpu" else free)
    parts = placed(Ingredients.of(task, Plan()), torch.device("meta"))
    return residency.resident(replace(parts, plan=Plan(device="cpu", residency="device")))


def test_a_table_moves_to_the_device_and_batches_are_cut_there(monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_task(data=Pairs(), validation=Pairs(9))
    parts = on_meta(monkeypatch, task, 10**6)
    again = on_meta(monkeypatch, task, 10**6)
    for source, other in (
        (parts.roles.train, again.roles.train),
        (parts.roles.validation, again.roles.validation),
    ):
        assert source is other and source.device.type == source.columns[0].device.type == "meta"
    assert task.roles.train is not parts.roles.train and len(parts.roles.train) == 24
    feed = open_feed(parts.roles.train, parts.roles.order, Treatment(torch.device("meta"), 0))
    batches = list(feed.epoch(0))
    assert [(x.device.type, tuple(x.shape), size) for (x, _), size in batches] == [
        *[("meta", (5, 6), 5)] * 4,
        ("meta", (4, 6), 4),
    ]


def test_a_table_larger_than_half_of_the_device_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_task(data=(torch.zeros(10**6, 6), torch.zeros(10**6, dtype=torch.int64)))
    with pytest.raises(PlanError, match=r"data takes 32 MB, and meta has 50 MB free; expected at most half"):
        on_meta(monkeypatch, task, 50_000_000)
