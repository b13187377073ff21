"""Products that needn't be, told from what really runs: shapes and operators are torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.records.profile import Remedy
from hotloop.profiler.detectors import operators
from hotloop.profiler.detectors.step import ProfiledStep
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

WORDS, WIDTH = 1500, 192


class LookedUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Linear(WORDS, 16, bias=False), nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(nn.functional.one_hot(words, WORDS).float()))


class OfIdentity(LookedUp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.eye(WORDS))

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(self.rows[words]))


class Compared(LookedUp):
    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table((words[:, None] == torch.arange(WORDS)).float()))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.base.weight + 2.0 * (self.b @ self.a), self.base.bias)


class Beside(Adapted):
    """The same, with the rows multiplied by one factor after the other."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + 2.0 * ((rows @ self.a.T) @ self.b.T)


def found(model: nn.Module, inputs: Tensor) -> list[Remedy]:
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=1e-3)

    def loop() -> None:
        for _ in range(40):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert profile.step_ms is not None
    step = ProfiledStep(profile, profile.step_ms)
    return [*operators.one_hot_matmul(step), *operators.expanded_low_rank(step)]


@pytest.mark.parametrize("model", [LookedUp, OfIdentity, Compared, Adapted])
def test_a_product_that_need_not_be_is_named(model: type[nn.Module]) -> None:
    words = issubclass(model, LookedUp)
    inputs, said = (torch.randint(WORDS, (64,)), "one-hot") if words else (torch.randn(16, WIDTH), "thin factors")
    (named,) = found(model(), inputs)
    assert said in named.cause and named.gain > 0.1


class Chosen(nn.Module):
    """Goes on with the most likely of a layer's outputs, and lets gradients through to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.book = nn.Linear(WIDTH, WORDS), nn.Parameter(torch.randn(WORDS, 16))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.gumbel_softmax(self.scores(rows), hard=True) @ self.book


class Targets(nn.Module):
    """A last layer whose targets are written out as ones and zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, rows: Tensor) -> Tensor:
        targets = nn.functional.one_hot(torch.arange(len(rows)), WORDS).float()
        return targets * nn.functional.log_softmax(self.scores(rows), -1)


@pytest.mark.parametrize("model", [Chosen, Targets])
def test_what_looks_nothing_up_is_left_alone(model: type[nn.Module]) -> None:
    assert found(model(), torch.randn(64, WIDTH)) == []


class Graph(OfIdentity):
    """Rows of a matrix that says which are neighbours, beside an identity of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = self.rows
        self.rows = self.identity + (torch.rand(WORDS, WORDS) < 0.01)


def test_rows_of_another_matrix_are_left_alone() -> None:
    assert found(Graph(), torch.randint(WORDS, (64,))) == []


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_without_a_bias_is_seen_as_well(bias: bool) -> None:
    model = Adapted()
    model.base.bias = model.base.bias if bias else None
    (named,) = found(nn.Sequential(nn.Linear(WIDTH, WIDTH), model), torch.randn(16, WIDTH))
    assert "thin factors" in named.cause


@pytest.mark.parametrize("rows", [16, 1024])
def test_rows_that_go_through_thin_factors_are_left_alone(rows: int) -> None:
    assert found(Beside(), torch.randn(rows, WIDTH)) == []
