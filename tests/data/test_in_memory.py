"""A data set read into memory trains bit by bit as it does sample by sample, or is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import hotloop
from hotloop.core import reporter
from hotloop.core.random.rng import generator_states
from hotloop.core.state import State
from hotloop.core.state import differing_paths as all_differences
from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.sources import Samples
from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext, move_to_device
from hotloop.lowering.task_facts import task_facts
from hotloop.lowering.transforms import residency
from hotloop.plan import Plan
from tests.support.killed_training import train
from tests.support.programs import a_task, advance, labelled, last_state
from tests.support.tasks.in_memory_datasets import Arrays, Named, Pairs, after, named_step, reading

X, Y = labelled()

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


def differences(one: State, other: State) -> list[str]:
    """Without what data sets count of themselves: one that is read into memory is asked for fewer samples."""
    return [path for path in all_differences(one, other) if not path.startswith("/attributes/")]


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


@pytest.mark.more
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


@pytest.mark.more
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
    assert again.parts.splits.train is first.parts.splits.train


def test_progress_is_told_while_reading() -> None:
    told: list[tuple[int, int]] = []
    reading(Pairs(12), progress=lambda done, samples: told.append((done, samples)))
    assert list(dict.fromkeys(told)) == [(0, 12), (5, 12), (10, 12), (12, 12)]  # the first while it asks some


def test_long_reading_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_REPORT_INTERVAL_S", 0.0)
    lines: list[str] = []
    hotloop.lower(a_task(data=Pairs()), Plan(residency="host"), lines.append)
    assert "reading data into memory: 20 of 24 samples" in lines


def test_facts_are_the_tasks_whatever_the_plan() -> None:
    task = a_task(data=Pairs())
    streamed, held = (task_facts(hotloop.lower(task, Plan(residency=name)).parts) for name in ("stream", "host"))
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
    assert program.parts.splits.train is task.roles.train and program.parts.notes == ()


def test_other_validation_data_stays_as_it_is_and_that_is_said() -> None:
    lines: list[str] = []
    drawing = Pairs(9, then=lambda index, x: x + torch.rand(6))
    program = hotloop.lower(a_task(data=Pairs(), validation=drawing), Plan(residency="host"), lines.append)
    assert isinstance(program.parts.splits.validation, Samples)
    assert lines[1] == (
        "validation can't be read into memory: its sample 0 draws from torch's random generator; "
        "the data is loaded sample by sample"
    )
    asked = drawing.asked
    hotloop.lower(program.parts.task, Plan(residency="host"), lines.append)
    assert drawing.asked == asked


# --- on the device ------------------------------------------------------------------------------------------


def on_meta(monkeypatch: pytest.MonkeyPatch, task: hotloop.Task, free: int) -> Any:
    """The ingredients under residency=device on torch's device without memory, which takes part in all but values."""
    monkeypatch.setattr(residency, "device_free_bytes", lambda device: None if device.type == "cpu" else free)
    parts = move_to_device(LoweringContext.from_task(task, Plan()), torch.device("meta"))
    return residency.apply_residency(replace(parts, plan=Plan(device="cpu", residency="device")))


def test_a_table_moves_to_the_device_and_batches_are_cut_there(monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_task(data=Pairs(), validation=Pairs(9))
    parts = on_meta(monkeypatch, task, 10**6)
    again = on_meta(monkeypatch, task, 10**6)
    for source, other in (
        (parts.splits.train, again.splits.train),
        (parts.splits.validation, again.splits.validation),
    ):
        assert source is other and source.device.type == source.columns[0].device.type == "meta"
    assert task.roles.train is not parts.splits.train and len(parts.splits.train) == 24
    feed = open_feed(parts.splits.train, parts.splits.order, BatchTransform(torch.device("meta"), 0))
    batches = list(feed.epoch(0))
    assert [(x.device.type, tuple(x.shape), size) for (x, _), size in batches] == [
        *[("meta", (5, 6), 5)] * 4,
        ("meta", (4, 6), 4),
    ]


def test_a_table_larger_than_half_of_the_device_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_task(data=(torch.zeros(10**6, 6), torch.zeros(10**6, dtype=torch.int64)))
    with pytest.raises(PlanError, match=r"data takes 32 MB, and meta has 50 MB free; expected at most half"):
        on_meta(monkeypatch, task, 50_000_000)
