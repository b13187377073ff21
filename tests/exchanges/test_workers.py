"""Batches from workers have the bits, the order and the random numbers of the script's own loader, or are refused."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from hotloop.core.random.rng import generator_states
from hotloop.data.batch_difference import batch_difference
from hotloop.exchanges import part as part_module
from hotloop.exchanges import workers as workers_module

SCRIPTS = Path(__file__).parents[1] / "support/scripts"

SAMPLES = 90


class Plain(Dataset):
    """A data set that makes each sample anew, with texts and numbers."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.files = [f"{row}.jpg" for row in range(samples)]
        self.scale = 2.0
        self.table = {"labels": list(range(samples))}
        self.weights = torch.ones(4)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Any:
        label = self.table["labels"][row]
        return {"x": self.value(row) * self.scale * self.weights[0], "y": label, "name": self.files[row]}

    def value(self, row: int) -> Any:
        return torch.full((3, 5), float(row)).sin()


class Decoded(Plain):
    """Decodes JPEG files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        generator = np.random.default_rng(0)
        self.files = []
        for row in range(SAMPLES):
            self.files.append(str(folder / f"{row}.jpg"))
            Image.fromarray(generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(self.files[-1])

    def __getitem__(self, row: int) -> Any:
        with Image.open(self.files[row]) as file:
            pixels = np.asarray(file.convert("RGB").resize((12, 12)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255, row % 3


def steps(loader: DataLoader, epochs: int, after: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Batches, and the generators' states after each; the script itself draws at each batch."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for _ in range(epochs):
        for batch in loader:
            torch.rand(2)
            yield batch, generator_states()
            after()


def assert_same(workers: Any, make: Callable[[], DataLoader], epochs: int = 3) -> None:
    """Compares a loader with the same loader without workers."""
    found = list(steps(make(), epochs, workers.use))
    workers.leave()
    fetched = workers.fetched
    own = list(steps(make(), epochs))
    assert workers.fetched == fetched and len(found) == len(own)
    for (batch, states), (own_batch, own_states) in zip(found, own, strict=True):
        assert not batch_difference(own_batch, batch) and states == own_states


def sampler_options(name: str, dataset: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "in order": {},
        "shuffled": {"shuffle": True},
        "without the last": {"shuffle": True, "drop_last": True},
        "own generator": {"shuffle": True, "generator": generator},
        "weighted": {"sampler": WeightedRandomSampler(torch.arange(1.0, len(dataset) + 1), 60)},
        "a subset": {"sampler": SubsetRandomSampler(range(3, len(dataset)))},
        "with replacement": {"sampler": RandomSampler(dataset, replacement=True)},
    }[name]


ORDERS = ("in order", "shuffled", "without the last", "own generator", "weighted", "a subset", "with replacement")


@pytest.mark.few("shuffled", "own generator")
@pytest.mark.parametrize("order", ORDERS)
def test_batches_and_random_numbers_are_those_of_the_loader(workers, tmp_path: Path, order: str) -> None:
    dataset = Decoded(tmp_path)
    assert_same(workers, lambda: DataLoader(dataset, batch_size=8, **sampler_options(order, dataset)))
    assert workers.part.proven >= 3 and workers.fetched > 10 and workers.part.is_bitwise
    assert not workers.processes()


@pytest.mark.parametrize("kind", [Plain, lambda: Subset(Plain(), range(5, 80))], ids=["dicts and texts", "Subset"])
def test_other_samples(workers, kind: Callable[[], Dataset]) -> None:
    dataset = kind()
    assert_same(workers, lambda: DataLoader(dataset, batch_size=8, shuffle=True))
    assert workers.fetched > 10


def test_several_workers(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module.math, "ceil", lambda value: 3)
    monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda process: range(3))
    dataset = Plain()
    assert_same(workers, lambda: DataLoader(dataset, batch_size=4, shuffle=True))
    assert workers.part.exchange == "3 processes fetch ahead" and workers.fetched > 20


def test_a_generator_of_the_script_that_draws_between_batches(workers) -> None:
    """The sampler draws from the generator at the end of an epoch as well, after the script's draws."""
    dataset, generator = Plain(), torch.Generator()

    def numbers() -> list[Any]:
        generator.manual_seed(1)
        found = []
        for _ in range(3):
            for batch in DataLoader(dataset, batch_size=8, shuffle=True, generator=generator):
                found += [batch["y"].tolist(), torch.rand((), generator=generator).item()]
                workers.use()
        return found

    exchanged = numbers()
    assert workers.fetched > 10
    workers.leave()
    assert numbers() == exchanged


def test_batches_are_ordinary_tensors(workers) -> None:
    found = [batch["x"] for batch, _ in steps(DataLoader(Plain(), batch_size=8), 2, workers.use)]
    assert workers.fetched
    for value in found:
        assert not value.is_shared()
        value.add_(1).resize_(200)


def test_windows_without_exchanges_use_no_workers(workers) -> None:
    dataset, counts = Plain(400), []

    def switch() -> None:
        workers.use()
        counts.append(workers.fetched)
        workers.is_enabled = len(counts) % 20 < 10

    found = list(steps(DataLoader(dataset, batch_size=8, shuffle=True), 1, switch))
    workers.leave()
    own = list(steps(DataLoader(dataset, batch_size=8, shuffle=True), 1))
    assert all(
        not batch_difference(one[0], other[0]) and one[1] == other[1] for one, other in zip(found, own, strict=True)
    )
    assert counts[19] == counts[12] < counts[28] > 0


def test_the_pass_ends_with_a_break_and_with_its_iterator(workers) -> None:
    dataset = Plain()
    loader = DataLoader(dataset, batch_size=4)
    list(steps(loader, 1, workers.use))
    assert workers.part.stage == "use" and not workers.processes()
    for number, _ in enumerate(loader):
        if number == 4:
            assert workers.processes()
            break
    assert not workers.processes()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert workers.processes()
    del iterator
    assert not workers.processes()
    assert_same(workers, lambda: loader, 1)


def test_samples_in_memory_need_no_workers(workers, loaders, tmp_path: Path) -> None:
    """The table of samples is filled from the workers' batches, and then used."""
    dataset = Decoded(tmp_path)
    assert_same(workers, lambda: DataLoader(dataset, batch_size=8, shuffle=True), 5)
    assert workers.fetched > 10 and workers.part.reason == "its samples are cut from memory"
    assert loaders.part.proven >= 3


class Draws(Plain):
    def value(self, row: int) -> Any:
        return super().value(row) + torch.rand(3, 5)


class DrawsFromPython(Plain):
    def value(self, row: int) -> Any:
        return super().value(row) + random.random()


class DrawsLate(Plain):
    """Draws at its 500th sample alone."""

    def value(self, row: int) -> Any:
        return super().value(row) + (torch.rand(()) + np.random.rand() if row == 499 else 0)


class Counted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def value(self, row: int) -> Any:
        self.count += 1
        return super().value(row)


class CountedInList(Plain):
    reads: list[int] = [0]  # noqa: RUF012  # the planted fault

    def value(self, row: int) -> Any:
        self.reads[0] += 1
        return super().value(row)


COUNTS = {"reads": 0}


class CountedGlobally(Plain):
    def value(self, row: int) -> Any:
        COUNTS["reads"] += 1
        return super().value(row)


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def value(self, row: int) -> Any:
        return super().value(row) + float(self.generator.random())


GENERATOR = torch.Generator()


class GlobalGenerator(Plain):
    def value(self, row: int) -> Any:
        return super().value(row) + torch.rand((), generator=GENERATOR)


class Hidden(Plain):
    """Counts outside of all objects that can be followed."""

    def value(self, row: int) -> Any:
        np.planted_reads = getattr(np, "planted_reads", 0) + 1
        return super().value(row) + np.planted_reads


class Printed(Plain):
    def value(self, row: int) -> Any:
        print(row)
        return super().value(row)


class AsksForWorkers(Plain):
    def value(self, row: int) -> Any:
        return super().value(row) + (get_worker_info() is not None)


class OpenFile(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__, "rb")  # noqa: SIM115  # the planted fault

    def value(self, row: int) -> Any:
        self.file.seek(row)
        return super().value(row) + self.file.read(1)[0]


class Locked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Iterating(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(10**6))

    def value(self, row: int) -> Any:
        return super().value(row) + next(self.numbers)


class LongNested(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.boxes = [[row] for row in range(2000)]


class LargeArray(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((1 << 20) + 1)


class HeldImages(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.images = [Image.new("RGB", (4, 4))]


REFUSED: dict[Callable[[], Any], str] = {
    Draws: workers_module.DRAWS,
    DrawsFromPython: workers_module.DRAWS,
    Counted: workers_module.CHANGES,
    CountedInList: workers_module.CHANGES,
    CountedGlobally: workers_module.CHANGES,
    OwnGenerator: "random generator of its own",
    GlobalGenerator: "random generator of its own",
    Hidden: "differs when it is read again",
    Printed: "its code uses print",
    AsksForWorkers: "its code uses get_worker_info",
    OpenFile: "an open file",
    Locked: "would share (lock)",
    Iterating: "an iterator",
    LongNested: "a list of 2,000 items",
    LargeArray: "an array of shape 1048577",
    HeldImages: "an object of PIL.Image.Image",
}


@pytest.mark.few("Draws", "Counted", "CountedGlobally", "GlobalGenerator", "Hidden", "OpenFile", "LongNested")
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_data_set_that_workers_can_not_read_is_refused(workers, kind: Callable[[], Any], capsys) -> None:
    def outcome() -> Any:
        COUNTS["reads"], CountedInList.reads[0], np.planted_reads = 0, 0, 0
        GENERATOR.manual_seed(0)
        dataset = kind()
        found = list(steps(DataLoader(dataset, batch_size=8, shuffle=True), 2, workers.use))
        return found, getattr(dataset, "count", 0), COUNTS["reads"], CountedInList.reads[0], capsys.readouterr().out

    exchanged, *counts = outcome()
    assert workers.part.stage == "off" and REFUSED[kind] in workers.part.reason, workers.part.reason
    assert not workers.fetched and not workers.processes()
    workers.leave()
    own, *own_counts = outcome()
    assert counts == own_counts
    for (batch, states), (own_batch, own_states) in zip(exchanged, own, strict=True):
        assert not batch_difference(own_batch, batch) and states == own_states


def test_a_draw_at_the_500th_sample_ends_the_use_before_it(workers) -> None:
    dataset = DrawsLate(600)
    assert_same(workers, lambda: DataLoader(dataset, batch_size=8), epochs=2)
    assert workers.fetched > 40
    (note,) = workers.parts[0].notes
    assert "was taken back: " + workers_module.DRAWS in note and "\n" not in note


class Failing(Plain):
    def value(self, row: int) -> Any:
        if row == 70:
            raise KeyError("planted")
        return super().value(row)


def test_an_error_of_the_data_set_is_the_scripts_own(workers) -> None:
    loader = DataLoader(Failing(), batch_size=4)
    seen = []
    with pytest.raises(KeyError, match="planted") as caught:
        for batch, _ in steps(loader, 1, workers.use):
            seen.append(batch["y"].tolist())
    assert workers.fetched > 5 and len(seen) == 17
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "value" and not [one for one in frames if "/hotloop/exchanges/" in one.filename]
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert "a worker raised KeyError" in workers.part.reason and not workers.processes()


def change_an_item(dataset: Plain) -> None:
    dataset.files[75] = "other"


def change_a_number(dataset: Plain) -> None:
    dataset.scale = 3.0


def change_a_tensor(dataset: Plain) -> None:
    dataset.weights.mul_(2)


def change_within(dataset: Plain) -> None:
    dataset.table["labels"][75] = -1


def change_a_method(dataset: Plain) -> None:
    dataset.value = lambda row: torch.zeros(3, 5)  # type: ignore[method-assign]


CHANGES = (change_an_item, change_a_number, change_a_tensor, change_within, change_a_method)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_by_the_script_is_seen_in_the_next_batch(workers, change: Callable[[Plain], None]) -> None:
    def found() -> list[Any]:
        dataset, batches = Plain(), []
        for number, (batch, _) in enumerate(steps(DataLoader(dataset, batch_size=4), 2, workers.use)):
            batches.append(batch)
            if number == 9:
                change(dataset)
        return batches

    exchanged = found()
    assert workers.fetched > 20 and workers.part.stage == "use"
    workers.leave()
    assert all(not batch_difference(own, one) for own, one in zip(found(), exchanged, strict=True))


def test_a_change_at_each_batch_ends_the_use(workers) -> None:
    dataset = Plain(300)

    def change() -> None:
        workers.use()
        dataset.scale += 1

    list(steps(DataLoader(dataset, batch_size=4), 1, change))
    assert workers.part.stage == "off" and "the script changes the data set" in workers.part.reason


def test_a_wrong_batch_is_refused(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    real = workers_module.WatchedBatches.__getitem__
    monkeypatch.setattr(workers_module.WatchedBatches, "__getitem__", lambda batches, rows: real(batches, rows[::-1]))
    found = [batch["y"].tolist() for batch, _ in steps(DataLoader(Plain(), batch_size=8), 1, workers.use)]
    assert workers.part.stage == "off" and "a worker's batch differs" in workers.part.reason
    assert [row for rows in found for row in rows] == list(range(SAMPLES))


def test_a_batch_that_becomes_wrong_is_taken_back(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_module, "RECHECK_CALLS", 5)
    real = workers_module.WatchedBatches.__getitem__

    def later_wrong(batches: Any, rows: Any) -> Any:
        wrong, batch = real(batches, rows)
        return wrong, {**batch, "y": batch["y"] + 1} if rows[0] > 40 else batch

    monkeypatch.setattr(workers_module.WatchedBatches, "__getitem__", later_wrong)
    list(steps(DataLoader(Plain(400), batch_size=4), 1, workers.use))
    assert workers.part.stage == "off" and "was taken back" in workers.part.notes[0]


def test_a_worker_that_dies_is_replaced_by_the_script_s_own_process(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Plain()

    monkeypatch.setattr(workers_module, "_MIN_TIMEOUT_S", 2.0)

    def kill_once() -> None:
        workers.use()
        if workers.fetched == 5:
            for one in workers.processes():
                one.kill()

    before = signal.getsignal(signal.SIGCHLD)
    found = [batch["y"].tolist() for batch, _ in steps(DataLoader(dataset, batch_size=4), 2, kill_once)]
    assert [row for rows in found for row in rows] == list(range(SAMPLES)) * 2
    assert "its workers failed" in workers.parts[0].notes[0] and signal.getsignal(signal.SIGCHLD) is before


def test_a_worker_that_hangs_is_replaced_by_the_script_s_own_process(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_MIN_TIMEOUT_S", 0.5)
    real = workers_module.WatchedBatches.__getitem__

    def hanging(batches: Any, rows: Any) -> Any:
        if rows[0] == 60:
            time.sleep(1000)
        return real(batches, rows)

    monkeypatch.setattr(workers_module.WatchedBatches, "__getitem__", hanging)
    found = [batch["y"].tolist() for batch, _ in steps(DataLoader(Plain(), batch_size=4), 2, workers.use)]
    assert [row for rows in found for row in rows] == list(range(SAMPLES)) * 2
    assert "timed out" in workers.part.reason and workers.fetched and not workers.processes()


def test_a_fork_of_the_script_ends_no_worker(workers) -> None:
    loader = DataLoader(Plain(), batch_size=4)
    list(steps(loader, 1, workers.use))
    found = []
    for number, batch in enumerate(loader):
        found += batch["y"].tolist()
        if number == 5:
            worker = workers.processes()[0]
            if (child := os.fork()) == 0:
                try:
                    workers_module.abandon_pools()  # as the session does after a fork
                    import gc

                    gc.collect()
                    os._exit(0 if not active_children() else 1)
                finally:
                    os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert worker.is_running()
    assert found == list(range(SAMPLES)) and workers.part.stage == "use"


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": list},
        {"batch_size": None},
        {"num_workers": 1},
        {"batch_size": 1, "sampler": [4, 2, 1]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_loaders_are_left_alone(workers, options: dict[str, Any]) -> None:
    list(DataLoader(Plain(), **{"batch_size": 8, **options}))
    assert not workers.parts and not workers.fetched


def test_fast_data_has_no_part(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_MIN_FETCH_S", 10.0)
    list(DataLoader(TensorDataset(torch.zeros(90)), batch_size=4))
    assert not workers.parts


def test_too_few_batches_are_not_worth_processes(workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_MIN_PASS_S", 100.0)
    list(DataLoader(Plain(), batch_size=4))
    assert workers.part.stage == "off" and "too little to start processes" in workers.part.reason


@pytest.mark.parametrize(("with_workers_s", "stage"), [(1.0, "use"), (2.1, "off")])
def test_the_race_compares_batches(workers, with_workers_s: float, stage: str) -> None:
    site = workers_module.WorkerSite(Plain, workers, lambda _: None)
    for _ in range(2):
        site.end_batch(0.2, 0.1)
    part = workers.part
    part.stage = "race"
    for _ in range(2000):
        if part.stage == "race":
            site.end_batch(with_workers_s if site.uses_workers else 2.0, None)
    assert part.stage == stage and part.ratio.median == pytest.approx(2.0 / with_workers_s)
