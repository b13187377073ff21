"""A proof makes float64 of a part of a tensor at a time, and of no more of a State than it needs: with the same result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core import tensor_distance
from hotloop.core.tensor_distance import difference_norm, to_float64
from hotloop.parity import comparison
from hotloop.parity.comparison import run_one_step
from hotloop.parity.references import Float64Reference
from hotloop.plan import BASELINE
from tests.support.programs import advance

INF, NAN = math.inf, math.nan

PAIRS: dict[str, tuple[Tensor, Tensor]] = {
    "several slices": (torch.arange(10.0), torch.arange(10.0) + 0.5),
    "by columns": (torch.arange(12.0).view(3, 4).T, torch.arange(12.0).view(4, 3)),
    "a single number": (torch.tensor(2.0), torch.tensor(5.0)),
    "none": (torch.empty(0, 3), torch.empty(0, 3)),
    "complex": (torch.full((6,), 1 + 2j), torch.full((6,), 1 - 1j)),
    "sparse": (torch.eye(4).to_sparse(), torch.zeros(4, 4).to_sparse()),
    "another format": (torch.full((9,), 1.5, dtype=torch.bfloat16), torch.full((9,), 1.0)),
    "alike where they aren't finite": (torch.tensor([1.0, 2, 3, NAN, INF, 4]), torch.tensor([1.0, 2, 3, NAN, INF, 6])),
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (comparison, tensor_distance):
        monkeypatch.setattr(module, "SLICE", 4)


@pytest.mark.parametrize("name", PAIRS)
def test_distances_in_slices_are_those_of_the_whole(name: str) -> None:
    value, true = PAIRS[name]
    apart = (to_float64(value) - to_float64(true)).nan_to_num(0.0)
    assert difference_norm(value, true) == pytest.approx(float(torch.linalg.vector_norm(apart)), rel=1e-14)


@pytest.mark.parametrize(("one", "other"), [(NAN, 1.0), (INF, 1.0), (INF, -INF), (1.0, NAN)])
def test_what_is_not_finite_on_one_side_is_infinitely_far(one: float, other: float) -> None:
    far = difference_norm(torch.tensor([1.0] * 7 + [one]), torch.tensor([2.0] * 7 + [other]))
    assert not math.isfinite(far)


@pytest.mark.parametrize("name", PAIRS)
def test_changes_in_slices_are_those_of_the_whole(name: str) -> None:
    value, before = PAIRS[name]
    noted = comparison._StepRecord()
    noted.record(("update", "w"), value, before)
    expected = to_float64(value) - to_float64(before)
    assert torch.equal(noted["update", "w"].nan_to_num(7.0), expected.nan_to_num(7.0))


class Tied(nn.Module):
    """A weight that is used twice, complex numbers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second.weight = self.first.weight
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return (self.norm(self.second(self.first(x))) * self.turn).abs()


def a_task() -> hotloop.Task:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    return hotloop.Task(
        model=Tied,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        data=(x, x.abs()),
        batch_size=8,
        average=0.9,
    )


def test_the_truth_steps_from_the_numbers_of_a_state_and_gives_its_memory_back() -> None:
    task, cpu = a_task(), torch.device("cpu")
    program, truth = hotloop.lower(task, BASELINE), Float64Reference(task, cpu)
    advance(program, 3)
    start, batch = program.state(), next(iter(program.feed.epoch(0)))[0]
    true, plain = truth.step(start, batch), run_one_step(program, start, batch)[0]
    assert true.keys() == plain.keys()
    assert all(
        difference_norm(plain[key], true[key]) < 1e-5 * max(1.0, float(true[key].double().norm())) for key in true
    )
    truth.release()
    left = [*truth.program.model.parameters(), *truth.program.average.values()]
    assert not any(value.numel() or value.grad is not None for value in left)
    assert not truth.program.optimizer.state
