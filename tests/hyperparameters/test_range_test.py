"""The learning-rate range test recommends a rate that lowers the loss, or none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import StudyError
from hotloop.hyperparameters.range_test import range_test, recommend, smooth

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def task(target: torch.Tensor, **fields) -> hotloop.Task:
    given = dict(
        model=lambda: nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        data=(X, target),
        batch_size=16,
    )
    return hotloop.Task(**(given | fields))


def test_a_rate_that_lowers_the_loss_is_recommended_and_confirmed() -> None:
    found = range_test(task(X.sum(1, keepdim=True)), hotloop.Plan(), "hotloop train task.py -p lr=", steps=60)
    assert found.recommended is not None and 1e-3 < found.recommended < 1
    assert found.last_loss < 0.5 * found.first_loss
    assert found.command == f"hotloop train task.py -p lr={found.recommended:.3g}"
    assert found.rates == sorted(found.rates) and len(found.rates) == len(found.losses) < 60  # it ends when it diverges


def test_nothing_is_recommended_where_no_rate_lowers_the_loss() -> None:
    found = range_test(task(torch.zeros(64, 1), model=lambda: _Constant()), hotloop.Plan(), steps=20)
    assert (found.recommended, found.command) == (None, "")


class _Constant(nn.Module):
    """Its output doesn't depend on its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * 0 + 1 + 0 * self.weight


def test_the_steepest_descent_before_the_minimum_is_recommended() -> None:
    rates = [10.0**power for power in range(-6, 2)]
    assert recommend(rates, [3.0, 3.0, 2.9, 1.5, 1.0, 0.9, 2.0, 9.0]) == 1e-3
    assert recommend(rates, [1.0, 2.0, 3.0]) is None


def test_smoothing_starts_at_the_first_loss() -> None:
    assert smooth([4.0])[0] == pytest.approx(4.0)
    assert all(math.isclose(value, 2.0) for value in smooth([2.0] * 5))


def test_an_optimizer_without_a_rate_is_one_line() -> None:
    zero = task(X.sum(1, keepdim=True), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    with pytest.raises(hotloop.HotloopError, match="no learning rate above 0") as error:
        range_test(zero, hotloop.Plan(), steps=5)
    assert isinstance(error.value, StudyError)


def test_a_loss_that_is_never_finite_gives_no_rate() -> None:
    assert recommend([1e-6, 1e-5], smooth([])) is None
