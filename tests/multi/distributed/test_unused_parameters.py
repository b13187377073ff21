"""Parameters that have a part in the loss of some ranks, of one, or of none: gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.random.rng import generator_for
from hotloop.core.state import State, tree_leaves
from hotloop.distributed.wrappers import ddp
from hotloop.lowering.steps.gradient_check import LaterGradients
from hotloop.plan import Plan
from tests.support.processes.rank_processes import of_ranks

SAMPLES, BATCH_SIZE = 60, 4
DATA = Plan(parallel="data", ranks=2)


class Gated(nn.Module):
    """Calls `extra` only if a sample of the batch has a large first number; the other samples get nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.extra, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, :1] > 1
        out = self.head(x)
        return out + large * self.extra(x) if bool(large.any()) else out


def task() -> hotloop.Task:
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return hotloop.Task(
        model=lambda: Gated().double(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3),
        data=(x, x[:, :3].argmax(1)),
        batch_size=BATCH_SIZE,
        epochs=2,
    )


def trained(plan: Plan) -> State:
    program = hotloop.lower(task(), plan)
    for _ in range(2):
        while not program.advance(5).ended:
            pass
        program.end_epoch()
    return program.state()


def difference(one: State, other: State) -> float:
    """The largest difference of parameters and optimizer state, which must have the same names."""
    a, b = (dict(tree_leaves([state.parameters, state.optimizer])) for state in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[path] - b[path]).abs().max()) for path in a if isinstance(a[path], Tensor))


def test_the_data_has_batches_of_each_kind() -> None:
    """Large samples in both ranks' rows, in those of one rank, and in none."""
    given = task()
    order = torch.randperm(SAMPLES, generator=generator_for(given.seed, "order", 0))
    large = (given.data[0][order, 0] > 1).view(-1, 2, BATCH_SIZE // 2).any(2).sum(1).tolist()
    assert set(large) == {0, 1, 2}


def test_parameters_that_some_ranks_use_are_updated_as_in_one_process(tmp_path: Path) -> None:
    alone = trained(Plan())
    for state in of_ranks(tmp_path, DATA, lambda world: trained(DATA)):
        assert difference(alone, state) < 1e-10


def zeros_for_all(patch: pytest.MonkeyPatch) -> None:
    """A parameter that no rank uses gets a gradient of zeros, so that weight decay changes it."""
    end = ddp.DdpModel.end_backward

    def ended(self: Any, figures: Tensor) -> Tensor:
        sums = end(self, figures)
        for value in self._trained:
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        return sums

    patch.setattr(ddp.DdpModel, "end_backward", ended)


def own_use_alone(patch: pytest.MonkeyPatch) -> None:
    """A rank takes the gradients of the parameters that it used itself."""
    end = ddp.DdpModel.end_backward

    def ended(self: Any, figures: Tensor) -> Tensor:
        unused = [value for value in self._trained if value.grad is None]
        sums = end(self, figures)
        for value in unused:
            value.grad = None
        return sums

    patch.setattr(ddp.DdpModel, "end_backward", ended)


@pytest.mark.few("own_use_alone")
@pytest.mark.parametrize("plant", [zeros_for_all, own_use_alone])
def test_a_planted_fault_is_found(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained(Plan())
    plant(monkeypatch)
    monkeypatch.setattr(LaterGradients, "check", lambda *parts: None)  # the ranks' own comparison would refuse it
    states = of_ranks(tmp_path, DATA, lambda world: trained(DATA))
    assert max(found(alone, state) for state in states) > 1e-6


def found(one: State, other: State) -> float:
    """The same as `difference`; infinite if the names differ."""
    try:
        return difference(one, other)
    except AssertionError:
        return float("inf")
