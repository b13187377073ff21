"""Batches from memory have the bits, the order and the random numbers of the script's own loader."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from hotloop.core.random.rng import generator_states
from hotloop.data.batch_difference import batch_difference
from hotloop.exchanges import loader_exchange
from hotloop.exchanges import part as part_module
from hotloop.exchanges.loader_exchange import SampleTable, TableRefusal
from tests.exchanges.conftest import set_clocks

SAMPLES = 50


def arrays() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 2, 3, generator=generator), torch.randint(0, 5, (SAMPLES,), generator=generator)


class Own(Dataset):
    """A data set as tutorials write them."""

    def __init__(self) -> None:
        self.inputs, self.labels = arrays()
        self.scale = 2.0
        print("made", end="")  # in the constructor, so no reason to refuse

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> Any:
        return {"x": self.transform(self.inputs[row]), "y": int(self.labels[row]), "z": float(row)}

    def transform(self, value: Tensor) -> Tensor:
        return value / self.scale - 0.5


def epochs(loader: DataLoader, count: int) -> Iterator[Any]:
    """Batches, and the generators' states after each epoch."""
    torch.manual_seed(3)
    for _ in range(count):
        yield from loader
        yield generator_states()


def assert_same_batches(loaders: Any, dataset: Any, count: int = 6, **options: Any) -> None:
    """Compares the loader with its exchange with the same loader without."""
    exchanged = epochs(DataLoader(dataset, **options), count)
    batches = []
    for batch in exchanged:
        batches.append(batch)
        for part in loaders.parts:
            part.stage = "use" if part.stage == "race" else part.stage
    used = [part.stage for part in loaders.parts]
    for part in loaders.parts:
        part.stage = "off"
    own = list(epochs(DataLoader(dataset, **options), count))
    assert len(own) == len(batches)
    for mine, theirs in zip(batches, own, strict=True):
        assert mine == theirs if isinstance(mine, dict) and "torch's" in mine else not batch_difference(mine, theirs)
    assert used == ["use"] * len(used) and used


DATASETS = {
    "TensorDataset": lambda: TensorDataset(*arrays()),
    "one tensor": lambda: TensorDataset(arrays()[0]),
    "channels last": lambda: TensorDataset(torch.randn(SAMPLES, 2, 3, 4).to(memory_format=torch.channels_last)),
    "strided": lambda: TensorDataset(torch.randn(SAMPLES, 6)[:, ::2], torch.zeros(()).expand(SAMPLES)),
    "Subset": lambda: Subset(TensorDataset(*arrays()), list(range(40, 2, -1))),
    "random_split": lambda: random_split(TensorDataset(*arrays()), [30, 20])[0],
    "numpy subset": lambda: Subset(TensorDataset(*arrays()), torch.arange(30).tolist()),
    "own": Own,
    "subset of own": lambda: Subset(Own(), range(3, 45)),
}


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}], ids=str)
@pytest.mark.parametrize("name", DATASETS)
def test_batches_and_random_numbers_are_those_of_the_loader(loaders, name: str, options: dict) -> None:
    if name == "channels last":
        torch.manual_seed(0)
    assert_same_batches(loaders, DATASETS[name](), batch_size=8, **options)


def test_a_loader_with_its_own_sampler_and_generator(loaders) -> None:
    sampler = torch.utils.data.WeightedRandomSampler(torch.rand(SAMPLES), 30, generator=torch.Generator())
    sampler.generator.manual_seed(0)
    batches = list(DataLoader(TensorDataset(*arrays()), batch_size=4, sampler=sampler))
    loaders.part.stage = "use"
    again = list(DataLoader(TensorDataset(*arrays()), batch_size=4, sampler=sampler))
    assert len(batches) == len(again) == 8


def test_a_batch_may_have_a_sample_twice(loaders) -> None:
    dataset = Own()
    sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=20 * SAMPLES)
    assert_same_batches(loaders, dataset, batch_size=20, sampler=sampler)


def test_batches_are_new_tensors(loaders) -> None:
    for dataset in (TensorDataset(*arrays()), Own()):
        loader = DataLoader(dataset, batch_size=10)
        for _ in range(3):
            list(loader)
        loaders.parts[-1].stage = "use"
        first = next(iter(loader))
        for value in first.values() if isinstance(first, dict) else first:
            value.zero_()
        second = next(iter(loader))
        assert (second["x"] if isinstance(second, dict) else second[0]).abs().sum() > 0


def trained(loaders: Any, dataset: Any, count: int = 4) -> DataLoader:
    """A loader whose exchange is in use."""
    loader = DataLoader(dataset, batch_size=10)
    for _ in range(count):
        list(loader)
    assert loaders.parts[-1].stage == "race"
    loaders.parts[-1].stage = "use"
    list(loader)
    return loader


def change_in_place(dataset: Any) -> None:
    (dataset.inputs if isinstance(dataset, Own) else dataset.tensors[0])[7] = 5.0


def change_by_replacement(dataset: Any) -> None:
    if isinstance(dataset, Own):
        dataset.inputs = None
        dataset.inputs = torch.ones(SAMPLES, 2, 3)
    else:
        dataset.tensors = (torch.ones(SAMPLES, 2, 3), dataset.tensors[1])


def change_of_a_number(dataset: Any) -> None:
    dataset.scale = 3.0


def change_of_a_method(dataset: Any) -> None:
    dataset.transform = lambda value: value * 2


@pytest.mark.parametrize(
    "change",
    [change_in_place, change_by_replacement, change_of_a_number, change_of_a_method],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("kind", [Own, lambda: TensorDataset(*arrays())], ids=["own", "TensorDataset"])
def test_a_change_of_the_data_set_is_seen_in_the_next_batch(loaders, change: Any, kind: Any) -> None:
    dataset = kind()
    if not isinstance(dataset, Own) and change in (change_of_a_number, change_of_a_method):
        pytest.skip("a TensorDataset has no other parts")
    loader = trained(loaders, dataset)
    batches = iter(loader)
    next(batches)
    change(dataset)
    rest = [next(batches), next(batches), *loader]
    loaders.parts[-1].stage = "off"
    own = list(loader)
    for mine, theirs in zip(rest, [*own[1:3], *own], strict=True):
        assert not batch_difference(mine, theirs)


class Random(Own):
    def __getitem__(self, row: int) -> Any:
        return self.inputs[row] + torch.rand(())


class RandomPython(Own):
    def __getitem__(self, row: int) -> Any:
        return self.inputs[row] + random.random()


class RandomOwn(Own):
    """Draws from a generator that no global state shows."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row] + float(self.generator.random())


class Counted(Own):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __getitem__(self, row: int) -> Any:
        self.count += 1
        return self.inputs[row]


class CountedByOwnObject(Own):
    def __getitem__(self, row: int) -> Any:
        options.reads += 1
        return super().__getitem__(row)


class Printed(Own):
    def __getitem__(self, row: int) -> Any:
        return self.shown(row)

    def shown(self, row: int) -> Any:
        print(row)
        return self.inputs[row]


class LongList(Own):
    def __init__(self) -> None:
        super().__init__()
        self.names = ["a"] * 5000

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row]


class LargeArray(Own):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((SAMPLES, 1000), dtype=np.float64)

    def __getitem__(self, row: int) -> Any:
        return torch.from_numpy(self.array[row])


class Shapes(Own):
    def __getitem__(self, row: int) -> Any:
        return self.inputs[row][: 1 + row // 30]


class Texts(Own):
    def __getitem__(self, row: int) -> Any:
        return self.inputs[row], "a name"


REFUSED = {
    Random: "draw random numbers",
    RandomPython: "draw random numbers",
    RandomOwn: "differs when it is read again",
    Counted: "changes the data set",
    CountedByOwnObject: "changes the data set",
    Printed: "its code uses print",
    LongList: "a list of 5,000 items",
    LargeArray: "an array of shape 50x1000",
    Shapes: "several shapes or types",
    Texts: "no plain tensors",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda one: one.__name__)
def test_a_data_set_that_can_not_be_stored_is_refused(loaders, kind: Any) -> None:
    loader = DataLoader(kind(), batch_size=10)
    for _ in range(4):
        list(loader)
    assert loaders.part.stage == "off" and REFUSED[kind] in loaders.part.reason


class Factor:
    """A class whose attribute a sample depends on."""

    value = 1.0


class Halved:
    value = 0.5


def scaled(value: Tensor) -> Tensor:
    return value * scale * options.factor * Factor.value * script_settings.factor * Halved.value


scale, options = 1.0, argparse.Namespace(factor=1.0, reads=0)

script_settings = types.ModuleType("script_settings")
"""A module of the script's own."""


class Helped(Own):
    """Samples depend on globals that other functions, objects, classes and modules have."""

    def __init__(self) -> None:
        super().__init__()
        announce()

    def __getitem__(self, row: int) -> Any:
        return scaled(self.inputs[row])


def announce() -> None:
    print("made", end="")  # the constructor calls this function, and a sample does not


HELPERS = {
    "a global of a function": (globals(), "scale"),
    "a global object": (vars(options), "factor"),
    "a module": (vars(script_settings), "factor"),
    "a global class": (globals(), "Factor"),
}


@pytest.mark.parametrize("case", HELPERS)
def test_a_change_of_what_a_helper_function_uses_is_seen(loaders, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setitem(sys.modules, "script_settings", script_settings)
    script_settings.__file__, script_settings.factor = __file__, 1.0
    dataset = Helped()
    loader = trained(loaders, dataset)
    names, name = HELPERS[case]
    monkeypatch.setitem(names, name, Halved if case == "a global class" else 2.0)
    assert torch.equal(torch.cat(list(loader)), scaled(dataset.inputs))


def test_a_change_of_a_class_attribute_is_seen(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "script_settings", script_settings)
    script_settings.__file__, script_settings.factor = __file__, 1.0
    dataset = Helped()
    loader = trained(loaders, dataset)
    monkeypatch.setattr(Factor, "value", 3.0)
    assert torch.equal(torch.cat(list(loader)), scaled(dataset.inputs))


def test_a_data_set_that_changes_at_each_pass_is_not_recorded_for_ever(loaders) -> None:
    dataset = Own()
    loader = trained(loaders, dataset)
    for _ in range(4):
        dataset.scale += 1
        assert torch.equal(torch.cat([batch["x"] for batch in loader]), dataset.transform(dataset.inputs))
    assert loaders.part.stage == "off" and loaders.part.reason == "the script changes the data set at each pass"
    assert "was taken back" in loaders.part.notes[-1]


def test_a_data_set_that_changes_now_and_then_is_used_between_the_changes(loaders) -> None:
    dataset = Own()
    loader = trained(loaders, dataset)
    for _ in range(4):
        dataset.scale += 1
        for _ in range(4):
            assert torch.equal(torch.cat([batch["x"] for batch in loader]), dataset.transform(dataset.inputs))
    assert loaders.part.stage == "use"


def test_the_race_counts_the_check_for_changes(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a data set of many objects, the check takes longer than the script's own batches."""
    dataset, clock, has_changed = Own(), [0.0], SampleTable.has_changed

    def check(table: SampleTable, source: Any) -> bool:
        clock[0] += 1.0
        return has_changed(table, source)

    monkeypatch.setattr(SampleTable, "has_changed", check)
    set_clocks(monkeypatch, lambda: clock[0])
    loader = DataLoader(dataset, batch_size=10)
    for _ in range(12):
        list(loader)
    assert loaders.part.stage == "off" and loaders.part.reason.startswith("not faster: 0.00 times")


def test_recording_is_work_of_hotloop_and_the_script_s_own_loading_is_none(
    loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, clock = Own(), [0.0]
    read = dataset.transform
    dataset.transform = lambda value: (clock.__setitem__(0, clock[0] + 1.0), read(value))[1]
    set_clocks(monkeypatch, lambda: clock[0])
    summarize, compared = loader_exchange.dataset_summary, [0.0]

    def summarize_slowly(source: Any) -> Any:
        clock[0] += 0.5
        compared[0] += 0.5
        return summarize(source)

    monkeypatch.setattr(loader_exchange, "dataset_summary", summarize_slowly)
    list(DataLoader(dataset, batch_size=10))
    assert clock[0] == SAMPLES + compared[0] and loaders.part.own_work_s == compared[0] > 0


class Once(Own):
    """Returns another sample from the fifth epoch on, for a reason that is outside its own objects."""

    epoch = 0

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row] + (hidden() > 4)


def hidden() -> int:
    return getattr(np, "planted_epoch", 0)


def test_a_hidden_change_is_found_by_a_comparison(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_module, "RECHECK_CALLS", 3)
    loader = trained(loaders, Once())
    monkeypatch.setattr(np, "planted_epoch", 5, raising=False)
    list(loader)
    assert loaders.part.stage == "off" and "was taken back" in loaders.part.notes[0]


@pytest.mark.parametrize("exact", [False, True])
def test_one_read_of_a_sample_is_enough_after_many_equal_repeats(exact: bool) -> None:
    data = TensorDataset(torch.randn(600, 2))
    table = SampleTable(exact=exact)

    def read(first: int, last: int) -> None:
        rows = list(range(first, last))
        table.record(data, rows, lambda: list(data[rows]))

    read(0, 500)
    assert not table.is_complete([0])
    read(0, 255)
    assert table.is_complete([0]) and not table.is_complete([300])
    read(255, 256)
    assert table.is_complete([300]) is not exact and not table.is_complete([550])
    assert torch.equal(table.cut([0, 255])[0], data[[0, 255]][0])


def test_a_sample_that_differs_among_the_repeats_is_refused() -> None:
    table, rows = SampleTable(exact=False), list(range(500))
    data = TensorDataset(torch.randn(500, 2))
    table.record(data, rows, lambda: list(data[rows]))
    with pytest.raises(TableRefusal, match="a sample differs when it is read again"):
        table.record(data, [7], lambda: [data[[7]][0] + 1])
    assert not table.is_complete([3])


def test_a_wrong_cut_is_refused(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loader_exchange._cut
    monkeypatch.setattr(loader_exchange, "_cut", lambda tensors, rows: real(tensors, rows[::-1]))
    loader = DataLoader(TensorDataset(*arrays()), batch_size=10)
    batches = list(loader)
    assert loaders.part.stage == "off" and "holds other values" in loaders.part.reason
    assert torch.equal(batches[0][0], arrays()[0][:10])


def test_other_collate_functions_workers_and_streams_are_left_alone(loaders) -> None:
    dataset = TensorDataset(*arrays())
    list(DataLoader(dataset, batch_size=10, collate_fn=lambda items: items))
    list(DataLoader(dataset, batch_size=None))
    list(DataLoader(dataset, batch_size=10, num_workers=1))
    list(DataLoader(list(zip(*arrays(), strict=True)), batch_size=10))
    assert all(part.proven == 0 for part in loaders.parts)


def test_an_error_of_the_data_set_is_the_scripts_own(loaders) -> None:
    class Failing(Own):
        def __getitem__(self, row: int) -> Any:
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted") as caught:
        list(DataLoader(Failing(), batch_size=10))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "__getitem__" and not [frame for frame in frames if "/hotloop/" in frame.filename]
    with pytest.raises(IndexError):
        list(DataLoader(TensorDataset(*arrays()), batch_size=2, sampler=[0, SAMPLES]))


@pytest.mark.parametrize("place", ["_cut", "_compare"])
def test_an_error_of_a_signals_handler_reaches_the_script(loaders, monkeypatch, end_by_signal, place: str) -> None:
    loader = DataLoader(TensorDataset(*arrays()), batch_size=10)
    if place == "_cut":
        trained(loaders, loader.dataset)
    monkeypatch.setattr(loader_exchange, "_cut" if place == "_cut" else "batch_difference", end_by_signal)
    with pytest.raises(TimeoutError):
        list(loader)
    assert loaders.part.stage in ("use", "proof") and not loaders.part.notes


def test_a_sample_that_is_recorded_when_a_signal_arrives(monkeypatch: pytest.MonkeyPatch, end_by_signal) -> None:
    monkeypatch.setattr(loader_exchange, "dataset_summary", end_by_signal)
    with pytest.raises(TimeoutError):
        SampleTable(exact=False).record(Own(), [0], lambda: None)


def test_a_data_set_is_freed_with_its_samples(loaders) -> None:
    dataset = Own()
    trained(loaders, dataset)
    alive = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert alive() is None


def test_an_exchange_that_fails_is_taken_back_and_the_batch_is_loaded(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TensorDataset(*arrays())
    loader = trained(loaders, dataset)

    def failing(tensors: Any, rows: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(loader_exchange, "_cut", failing)
    assert torch.equal(next(iter(loader))[0], arrays()[0][:10])
    assert loaders.part.stage == "off" and "planted" in loaders.part.notes[0]


def test_a_data_set_that_can_not_be_followed_loads_as_before(loaders) -> None:
    dataset = TensorDataset(*arrays())
    loader = trained(loaders, dataset)
    dataset.tensors = list(dataset.tensors)
    list(loader)
    dataset.tensors = None
    with pytest.raises(TypeError):
        next(iter(loader))
