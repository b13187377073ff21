"""Data sets that are read into memory as a whole, and trained from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

import hotloop
from hotloop.core.state import State
from hotloop.data.feeds.in_memory import InMemoryRead, read_into_memory
from hotloop.data.order import Order
from hotloop.data.sources import Samples, Table
from hotloop.plan import Plan
from tests.support.programs import advance, labelled

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
    return read_into_memory(given, InMemoryRead("data", Order(len(given), min(5, len(given)), 0), **fields))


def after(task: hotloop.Task, residency: str, *, steps: int = 12, workers: int = 0) -> State:
    program = hotloop.lower(task, Plan(residency=residency, workers=workers))
    program.seed_all()
    assert isinstance(program.parts.splits.train, Table if residency != "stream" else Samples)
    advance(program, steps)
    program.close()
    return program.state()
