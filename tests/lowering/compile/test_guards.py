"""Constants, other memory and set generators are refused in a compiled step, or train as eagerly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.lowering.compile.guards import graph_constants
from hotloop.lowering.compile.package_cache import _package_key
from hotloop.plan import Plan
from tests.support.eager_comparison import STEP, Layer, assert_trains_as_eagerly, refusal
from tests.support.programs import a_task, advance

# --- constants


class Listed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.scales = [self.one, self.other]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for scale in self.scales:
            x = x * scale
        return x


class Bound(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.25))
        self.activation = partial(F.prelu, weight=self.alpha)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x))


PRIVATE = np.random.default_rng(3)


class Mixing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        share = torch.tensor(PRIVATE.beta(1.0, 1.0), dtype=torch.float32)
        return self.layer(x * share + x.flip(0) * (1 - share))


TEACHER = nn.Linear(6, 3)


def taught(model: nn.Module, batch: Any, moves: bool) -> Tensor:
    with torch.no_grad():
        aim = TEACHER(batch[0])
        if moves:
            for mean, value in zip(TEACHER.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).view(-1).add_(value.view(-1), alpha=0.1)
    return F.mse_loss(model(batch[0]), aim)


class Keeping(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre


class Remembering(Layer):
    """Keeps its last output for who wants to see it, and computes it anew at each step."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.last, self.seen = x.detach(), [x.detach()]
        return x


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": Listed}, "reads a parameter or buffer, a tensor of shape (3,), by another way"),
        ({"model": Bound}, "reads a parameter or buffer, a tensor of shape (1,), by another way"),
        ({"model": Mixing}, "'Mixing.forward().PRIVATE.state."),
        ({"step": partial(taught, moves=True)}, "writes to a tensor of shape"),
        ({"model": Keeping}, "can't be captured"),
    ],
)
def test_a_constant_that_training_changes_is_refused(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(**fields)


@pytest.mark.parametrize("fields", [{"step": partial(taught, moves=False)}, {"model": Remembering}])
def test_a_constant_that_nothing_changes_trains_as_eagerly(fields: dict[str, Any]) -> None:
    assert_trains_as_eagerly(**fields)


def test_a_package_s_key_has_its_constants_bit_by_bit() -> None:
    program = hotloop.lower(a_task(step=partial(taught, moves=False)), STEP)
    advance(program, 1)
    captured = program._step._captured  # type: ignore[attr-defined]
    first = _package_key(captured, program.device, {})
    value = next(iter(graph_constants(captured.graph).values()))
    assert _package_key(captured, program.device, {}) == first
    with torch.no_grad():
        value.view(-1)[0].neg_()
        assert _package_key(captured, program.device, {}) != first
        value.view(-1)[0].neg_()


# --- other memory, and other buffers


class Momentum(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.follower.parameters(), self.layer.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.layer(x) - self.follower(x)


class Follower(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.follower.parameters(), self.layer.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.layer(x) - self.follower(x)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.centre, target)


def test_other_memory_for_a_parameter_is_refused() -> None:
    assert "'follower.weight' other memory" in refusal(model=Momentum)


def test_a_parameter_that_is_changed_in_place_follows() -> None:
    assert_trains_as_eagerly(model=Follower)


def test_a_loss_that_replaces_its_buffer_is_refused() -> None:
    assert "replaces the buffer 'centre'" in refusal(loss=Centred())


# --- generators that are set


class Recomputed(Layer):
    def __init__(self, block: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.layer(x), use_reentrant=False)
        return F.dropout(x, 0.1)


class Reseeding(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            x = x + 0.1 * torch.randn(6)
        return self.layer(x)


@pytest.mark.parametrize("model", [lambda: Recomputed(lambda x: F.dropout(x.sin(), 0.5)), Reseeding])
def test_a_step_that_sets_the_generator_and_draws_is_refused(model: Any) -> None:
    assert "sets torch's generator and draws" in refusal(model=model)


def attention(x: Tensor) -> Tensor:
    """Of a batch's samples to each other, without dropout."""
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


@pytest.mark.parametrize("block", [torch.sin, pytest.param(attention, marks=pytest.mark.more)])
def test_what_is_recomputed_without_draws_trains_as_eagerly(block: Any) -> None:
    assert_trains_as_eagerly(model=lambda: Recomputed(block))


@pytest.mark.parametrize("plan", [STEP, Plan(compile="forward")], ids=Plan.brief)
def test_sparse_gradients_are_refused(plan: Plan) -> None:
    words = torch.randint(0, 9, (24, 6)), torch.randint(0, 3, (24,))
    said = refusal(
        plan,
        model=lambda: nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3)),
        data=words,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert "the gradient of '0.weight' is sparse" in said and "sparse=True" in said
