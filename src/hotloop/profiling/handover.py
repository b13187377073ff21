"""What it takes to hand a clock over, beside what the clock itself leaves out: measured on modules that do nothing."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor, nn

CALLS, REPEATS = 100, 3


class Clock(Protocol):
    cost_ns: int

    def begin(self) -> None: ...

    def end(self) -> None: ...


class _View(nn.Module):
    """Makes a node for the graph, and does nothing; without `forward`, around which torch would call the script's hooks."""

    def _call_impl(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def measured_handover(clock: Clock) -> tuple[float, float]:
    """Nanoseconds that each call of a module adds forward, and each change of the module backward; takes 10 ms.

    The script's modes hear nothing of it.
    """
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        plain, clocked = [_pass_ns(None) for _ in range(REPEATS)], [_pass_ns(clock) for _ in range(REPEATS)]
    forward, backward = (min(run[at] for run in clocked) - min(run[at] for run in plain) for at in (0, 1))
    return max(0.0, forward / CALLS), max(0.0, backward / CALLS)


def _pass_ns(clock: Clock | None) -> tuple[int, int]:
    """Forward and backward through modules that take turns, less what the clock says that it took."""
    turns = (_View(), _View())
    x = first = torch.zeros(1, device="cpu", requires_grad=True)
    if clock is not None:
        clock.begin()
    began, cost = time.perf_counter_ns(), 0
    for number in range(CALLS):
        x = turns[number % 2](x)
    forward = time.perf_counter_ns()
    if clock is not None:
        cost = clock.cost_ns
    torch.autograd.grad(x, first)
    backward = time.perf_counter_ns()
    if clock is None:
        return forward - began, backward - forward
    clock.end()
    return forward - began - cost, backward - forward - (clock.cost_ns - cost)
