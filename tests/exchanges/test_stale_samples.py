"""Samples in memory are read anew when the data set changes, also where its objects show no change."""

from __future__ import annotations

import ctypes
import functools
import io
import multiprocessing
import queue
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hotloop.data.dataset_changes import dataset_summary
from hotloop.exchanges import loader_exchange

SAMPLES, BATCH = 40, 10


@dataclass
class Setting:
    level: float = 1.0


def scaled(value: Any) -> Any:
    return value * scaled.level  # type: ignore[attr-defined]


def level_in_a_function() -> Callable[[float], Any]:
    scaled.level = 1.0  # type: ignore[attr-defined]
    return functools.partial(setattr, scaled, "level")


class Leveled(Dataset):
    """Samples that are multiplied by a level, which `read` returns."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.inputs, self.read = torch.arange(1.0, 1 + SAMPLES), read

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> Any:
        return self.inputs[row] * self.read()


def _item(made: Any) -> tuple[Callable[[], float], Callable[[float], Any]]:
    return lambda: float(made[0]), lambda level: made.__setitem__(0, type(made[0])(level))


def _value(made: Any) -> tuple[Callable[[], float], Callable[[float], Any]]:
    return lambda: made.value, lambda level: setattr(made, "value", level)


def _tensor(write: Callable[[Any, float], Any]) -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = torch.ones(())
    return lambda: float(made), lambda level: write(made, level)


def _record() -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = np.ones(1, dtype=[("level", "f8")])[0]
    return lambda: float(made["level"]), lambda level: made.__setitem__("level", level)


def _queue() -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = queue.Queue()
    made.put(1.0)
    return lambda: made.queue[0], lambda level: (made.get(), made.put(level))


def _simple_queue() -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = queue.SimpleQueue()
    made.put(1.0)

    def read() -> float:
        level = made.get()
        made.put(level)
        return level

    return read, lambda level: (made.get(), made.put(level))


def _text() -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = io.StringIO("1.0")
    return lambda: float(made.getvalue()), lambda level: (made.seek(0), made.write(str(level)))


def _setting() -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = [Setting()]
    return lambda: made[0].level, lambda level: setattr(made[0], "level", level)


def _pointer() -> tuple[Callable[[], float], Callable[[float], Any]]:
    made = ctypes.pointer(ctypes.c_double(1.0))
    return lambda: made.contents.value, lambda level: setattr(made.contents, "value", level)


VISIBLE: dict[str, Callable[[], Any]] = {
    "deque": lambda: _item(deque([1.0])),
    "array": lambda: _item(array("d", [1.0])),
    "bytearray": lambda: _item(bytearray([1])),
    "memoryview": lambda: _item(memoryview(bytearray([1]))),
    "number of ctypes": lambda: _value(ctypes.c_double(1.0)),
    "array of ctypes": lambda: _item((ctypes.c_double * 2)(1.0, 1.0)),
    "shared number": lambda: _value(multiprocessing.Value("d", 1.0)),
    "shared array": lambda: _item(multiprocessing.Array("d", [1.0])),
    "array without dimensions": lambda: (lambda made: (lambda: float(made), lambda level: made.__setitem__((), level)))(
        np.ones(())
    ),
    "record": _record,
    "data of a tensor": lambda: _tensor(lambda made, level: made.data.fill_(level)),
    "memory of a tensor": lambda: _tensor(lambda made, level: made.numpy().fill(level)),
    "object in a list": _setting,
    "function's attribute": lambda: (lambda: scaled(1.0), level_in_a_function()),
    "queue": _queue,
}

HIDDEN: dict[str, Callable[[], Any]] = {
    "simple queue": _simple_queue,
    "text": _text,
    "pointer": _pointer,
}

INVISIBLE = "a sample that is read anew differs, so the data set changed where no change is visible"


@pytest.mark.parametrize("kind", VISIBLE)
def test_a_summary_has_each_kind_of_level(kind: str) -> None:
    read, change = VISIBLE[kind]()
    dataset = Leveled(read)
    before = dataset_summary(dataset)
    assert dataset_summary(dataset) == before
    change(2.0)
    assert dataset_summary(dataset) != before


def use(loaders: Any, dataset: Dataset) -> DataLoader:
    """A loader whose exchange is in use."""
    loader = DataLoader(dataset, batch_size=BATCH)
    while loaders.part.stage == "proof" if loaders.parts else True:
        list(loader)
    assert loaders.part.stage == "race", loaders.part.reason
    loaders.part.stage = "use"
    return loader


SHARED = ("shared number", "shared array")
"""Their code asks for the process, so the samples stay with the script."""


@pytest.mark.parametrize("kind", [kind for kind in (*VISIBLE, *HIDDEN) if kind not in SHARED])
def test_a_level_that_changes_within_an_epoch(loaders, kind: str) -> None:
    read, change = {**VISIBLE, **HIDDEN}[kind]()
    dataset, found = Leveled(read), []
    for number, batch in enumerate(use(loaders, dataset)):
        found.append(batch)
        if number == 1:
            change(3.0)
    levels = torch.tensor([1.0] * (2 * BATCH) + [3.0] * (SAMPLES - 2 * BATCH))
    assert torch.equal(torch.cat(found), dataset.inputs * levels)
    assert loaders.part.reason == (INVISIBLE if kind in HIDDEN else "")


@pytest.mark.parametrize("kind", [*HIDDEN, "queue", "memoryview"])
def test_exact_refuses_objects_that_can_not_be_compared(loaders, kind: str) -> None:
    loaders.exact = True
    list(DataLoader(Leveled({**VISIBLE, **HIDDEN}[kind]()[0]), batch_size=BATCH))
    assert loaders.part.stage == "off" and "can't be compared" in loaders.part.reason


@pytest.mark.parametrize("kind", ["deque", "array", "number of ctypes", "record", "object in a list"])
def test_exact_takes_objects_that_can_be_compared(loaders, kind: str) -> None:
    loaders.exact = True
    read, change = VISIBLE[kind]()
    dataset = Leveled(read)
    loader = use(loaders, dataset)
    change(2.0)
    assert torch.equal(torch.cat(list(loader)), 2 * dataset.inputs) and loaders.part.stage == "use"


def level_in_a_library() -> tuple[Callable[[], float], Callable[[float], Any]]:
    """A level in a module of a library, whose attributes no summary has."""
    return lambda: getattr(np, "planted_level", 1.0), lambda level: setattr(np, "planted_level", level)


class Augmented(Leveled):
    """Draws a random number for each sample once it is switched on, where no object of its own shows it."""

    def __getitem__(self, row: int) -> Any:
        return super().__getitem__(row) + (torch.rand(()) if self.read() > 1 else 0)


def test_a_sample_that_is_read_anew_draws_no_number_of_the_script(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "planted_level", 1.0, raising=False)
    read, change = level_in_a_library()
    dataset = Augmented(read)
    loaders.exact = True
    loader = use(loaders, dataset)
    change(2.0)
    torch.manual_seed(1)
    found = torch.cat(list(loader))
    assert loaders.part.reason == INVISIBLE
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # the seed that a loader draws for its workers
    assert torch.equal(found, torch.stack([dataset[row] for row in range(SAMPLES)]))


def test_one_sample_of_each_batch_is_read_anew(loaders, monkeypatch: pytest.MonkeyPatch) -> None:
    read, _ = VISIBLE["deque"]()
    loader, rows, load = use(loaders, Leveled(read)), [], loader_exchange._load
    monkeypatch.setattr(loader_exchange, "_load", lambda fetcher, index: (rows.extend(index), load(fetcher, index))[1])
    list(loader)
    assert len(rows) == SAMPLES // BATCH and len({row % BATCH for row in rows}) == len(rows)
