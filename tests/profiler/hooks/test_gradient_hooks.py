"""Hooks on gradients, told from what really runs: they run within the backward, at lines of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotloop.core.records.profile import Profile
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

pytestmark = pytest.mark.usefixtures("one_thread")

Hook = Callable[[Tensor], Tensor | None]


def clipped(gradient: Tensor) -> Tensor:
    return torch.where(gradient.abs() > 1.0, gradient.sign(), gradient)


IN_A_LINE: Hook = lambda gradient: torch.where(gradient.abs() > 1.0, gradient.sign(), gradient)  # noqa: E731
SEEN: list[Tensor] = []


class Rounded(torch.autograd.Function):
    """Of a weight, with a gradient where it isn't large: what a node computes, and so no hook."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() <= 1)


class Rounding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Rounded.apply(self.weight), Rounded.apply(self.bias))


def network(layer: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(12) for part in (layer(16, 16), nn.Tanh())))


def profile_of(hook: Hook) -> Profile:
    model = network()
    for value in model.parameters():
        value.register_hook(hook)
    return profile_with(model)


def profile_with(model: nn.Module) -> Profile:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 16)

    def loop() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    return watched(loop, observers=lambda watch: make_observers(watch, None))


@pytest.mark.few("function")
@pytest.mark.parametrize("hook", [clipped, IN_A_LINE], ids=["function", "lambda"])
def test_what_a_hook_does_is_its_own_lines(hook: Hook) -> None:
    where = f"{__file__.rpartition('/')[2]}:{hook.__code__.co_firstlineno + (hook is clipped)}"
    profile = profile_of(hook)
    inside = [one for one in profile.operators if one.name in ("aten::sign", "aten::where")]
    assert inside and {one.where.rpartition("/")[2] for one in inside} == {where}
    assert {one.phase for one in inside} == {"backward"}
    (named,) = [one for one in diagnose(profile).remedies if "a hook on each parameter's gradient" in one.cause]
    assert named.where.endswith(where) and "24 tensors" in named.cause


def test_one_that_runs_once_a_gradient_is_there_is_named() -> None:
    def seen(value: Tensor) -> None:
        assert value.grad is not None
        SEEN[:] = [clipped(value.grad)]

    model = network()
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(seen)
    assert any("a hook on each parameter's gradient: 24" in one.cause for one in diagnose(profile_with(model)).remedies)


@pytest.mark.more
def test_a_backward_of_ones_own_is_no_hook() -> None:
    profile = profile_with(network(Rounding))
    inside = [one for one in profile.operators if one.name == "aten::le"]
    assert inside and {one.phase for one in inside} == {"backward"}
    assert not any("hook" in one.cause for one in diagnose(profile).remedies)
