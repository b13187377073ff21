"""Plain values in attributes that ranks hold, each its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.plan import Plan
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.programs import labelled

pytestmark = pytest.mark.more

PLAN = Plan(parallel="data", ranks=2)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, target)


class Remembering(Counting):
    """Stores a figure of the rows that its own rank has."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.last = float(target.sum())
        return super().__call__(output, target)


class Samples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x, self.y = labelled()
        self.taken = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.taken += 1
        return self.x[index], self.y[index]


def reasons(folder: Path, loss: Any, data: Any) -> list[str]:
    task = hotloop.Task(
        model=lambda: nn.Linear(6, 3),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=data,
        batch_size=5,
        epochs=2,
    )
    return hotloop.fit(task, run=folder / "run", plan=PLAN, progress=False).record.facts.inexact


def test_a_value_of_a_ranks_own_rows_is_one_line(tmp_path: Path) -> None:
    (line,) = reasons(tmp_path, Remembering(), labelled())
    assert line == "loss.last has another value on each rank, and a checkpoint stores that of rank 0"


def test_values_that_are_the_same_are_none_and_those_of_a_data_set_are_one_line(tmp_path: Path) -> None:
    assert reasons(tmp_path / "arrays", Counting(), labelled()) == []
    (line,) = reasons(tmp_path / "samples", Counting(), Samples())
    assert line.startswith("loading samples changes data.taken in each rank's copy of the data set")
