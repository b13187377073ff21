"""A watch sees each change of what a data set refers to, and refuses what can't be seen."""

from __future__ import annotations

import functools
import random
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import Dataset

from hotloop.exchanges.dataset_watch import DatasetWatch

FACTOR = [1.0]
scale = 1


def scaled(value: float) -> float:
    return value * FACTOR[0]


class Nested:
    def __init__(self) -> None:
        self.numbers = [1, 2]

    def read(self) -> int:
        return self.numbers[0]


class Rich(Dataset):
    """Refers to objects of many kinds."""

    shared: dict[str, int] = {"a": 1}  # noqa: RUF012  # a change of it is planted

    def __init__(self) -> None:
        self.names = [f"{row}.jpg" for row in range(5000)]
        self.pairs = [(name, 1) for name in self.names]
        self.nested = Nested()
        self.read = self.nested.read
        self.partial = functools.partial(scaled, value=2.0)
        self.waiting = deque([1, 2])
        self.array = np.arange(100_000)
        self.objects = np.array(["a", "b"], dtype=object)
        self.frame = pandas.DataFrame({"name": self.names, "label": range(5000)})
        self.tensor = torch.zeros(3)
        self.kinds = {1, 2}

    def __getitem__(self, row: int) -> Any:
        return self.scale(row), [scaled(value) for value in range(row)]

    def scale(self, row: int) -> int:
        return row

    @staticmethod
    def fixed() -> float:
        return FACTOR[0]


def _set_global(dataset: Rich) -> None:
    FACTOR[0] += 1


CHANGES: dict[str, Callable[[Rich], Any]] = {
    "late item": lambda dataset: dataset.names.__setitem__(4321, "other"),
    "late pair": lambda dataset: dataset.pairs.__setitem__(4321, ("4321.jpg", 2)),
    "length": lambda dataset: dataset.names.append("more"),
    "nested": lambda dataset: dataset.nested.numbers.append(3),
    "attribute": lambda dataset: setattr(dataset, "new", 1),
    "class": lambda dataset: Rich.shared.__setitem__("a", Rich.shared["a"] + 1),
    "partial": lambda dataset: dataset.partial.keywords.__setitem__("value", 3.0),
    "deque": lambda dataset: dataset.waiting.rotate(),
    "array": lambda dataset: dataset.array.__setitem__(77_777, -1),
    "objects": lambda dataset: dataset.objects.__setitem__(1, "c"),
    "frame": lambda dataset: dataset.frame.__setitem__("label", 3),
    "tensor": lambda dataset: dataset.tensor.add_(1),
    "set": lambda dataset: dataset.kinds.add(3),
    "global": _set_global,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    dataset = Rich()
    watch = DatasetWatch(dataset)
    assert not watch.unfit and not watch.has_changed()
    CHANGES[change](dataset)
    assert watch.has_changed()


def test_an_attribute_is_not_confused_with_a_global_of_its_name() -> None:
    global scale
    watch = DatasetWatch(Rich())
    scale += 1
    assert not watch.has_changed()


def _memory_map(folder: Path, mode: Any) -> np.ndarray:
    np.zeros(1 << 20).tofile(folder / "array.bin")
    return np.memmap(folder / "array.bin", dtype=np.float64, mode=mode)


def test_a_large_array_of_a_file_open_for_reading_is_fit(tmp_path: Path) -> None:
    assert not DatasetWatch((_memory_map(tmp_path, "r"),)).unfit


UNFIT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file": (lambda folder: (folder / "a.txt").open("w"), "an open file"),
    "method of a file": (lambda folder: functools.partial((folder / "a.txt").open("w").write), "an open file"),
    "connection": (lambda folder: sqlite3.connect(":memory:"), "would share (Connection)"),
    "generator": (lambda folder: random.Random(1), "random generator of its own"),
    "method of a generator": (lambda folder: torch.Generator().seed, "random generator of its own"),
    "iterator": (lambda folder: iter([1]), "an iterator"),
    "large bytearray": (lambda folder: bytearray(1 << 17), "an object of builtins.bytearray"),
    "large array": (lambda folder: _memory_map(folder, "r+"), "an array of shape 1048576"),
    "long nested list": (lambda folder: [[1]] * 1001, "a list of 1,001 items"),
    "sparse": (lambda folder: torch.zeros(3).to_sparse(), "torch.sparse_coo on cpu"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_can_not_be_followed_is_refused(kind: str, tmp_path: Path) -> None:
    make, reason = UNFIT[kind]
    assert reason in DatasetWatch(({"value": make(tmp_path)},)).unfit


def test_global_generators_are_fit() -> None:
    assert not DatasetWatch((random.random, np.random.rand, torch.default_generator)).unfit
