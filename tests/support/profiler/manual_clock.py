"""A clock that only moves where a test says so, and layers that move it: who gets the time is then known exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.records.profile import ModuleTime
from hotloop.profiler.timers.modules import ModuleClock


class Hands:
    """A clock in ns that stands still until it is moved, by whole milliseconds."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def move(self, ms: int) -> None:
        self.now += ms * 1_000_000


HANDS = Hands()


class Slow(torch.autograd.Function):
    """Takes so many ms forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: int, backward_ms: int) -> Tensor:
        HANDS.move(forward_ms)
        ctx.backward_ms = backward_ms
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        HANDS.move(ctx.backward_ms)
        return gradient * 2, None, None


class Layer(nn.Module):
    def __init__(self, forward_ms: int, backward_ms: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.takes = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x * self.weight, *self.takes)


class Block(nn.Module):
    """Two layers, with something of its own before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(1, 20), Layer(3, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(Slow.apply(x, 100, 1000))
        return Slow.apply(self.second(Slow.apply(x, 100, 1000)), 100, 1000)


def measured(step: Callable[[], Any], steps: int = 2) -> dict[str, ModuleTime]:
    """What the clock says of a step, by module."""
    clock = ModuleClock(now=HANDS, handover_ns=(0.0, 0.0))
    for _ in range(steps):
        clock.begin()
        step()
        clock.end()
    clock.close()
    return {one.name: one for one in clock.times(None)}


def ms(found: dict[str, ModuleTime]) -> dict[str, tuple[float | None, float | None]]:
    return {name: (one.forward_ms, one.backward_ms) for name, one in found.items()}


def own_ms(found: dict[str, ModuleTime]) -> dict[str, tuple[float | None, float | None]]:
    return {name: (one.own_forward_ms, one.own_backward_ms) for name, one in found.items()}


def ones() -> Tensor:
    return torch.ones(3, requires_grad=True)
