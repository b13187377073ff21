"""Faults that tests plant into the steps of a Program."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.lowering.program import Program


def around(holder: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    setattr(holder, name, make(getattr(holder, name)))


def module_of(program: Program, name: str) -> Any:
    return program.model.get_submodule(name)


def zero_grad_skipped(program: Program) -> None:
    program._step._clear_gradients = lambda: None  # type: ignore[method-assign]


def last_batch_dropped(program: Program) -> None:
    around(
        program.feed,
        "epoch",
        lambda epoch: lambda number, start=0: iter(list(epoch(number, start))[: max(0, 3 - start)]),
    )


def mask_repeated(program: Program) -> None:
    around(program._step.draws, "seed", lambda seed: lambda step: seed(0))


def statistics_not_updated(program: Program) -> None:
    norm = module_of(program, "1")
    norm.momentum = 0.0


def loss_scaled(program: Program) -> None:
    loss_scaled_if(program, lambda: True)


def loss_scaled_if(program: Program, condition: Callable[[], bool]) -> None:
    """A gradient that is a thousandth too long in steps where the condition is true."""
    around(
        program._step,
        "_backward_of",
        lambda backward: lambda loss: backward(loss * (1.001 if condition() else 1.0)),
    )


def input_changed(program: Program) -> None:
    def make(compute: Callable) -> Callable:
        def changing(batch: Any) -> Any:
            batch[0].add_(1e-3)
            return compute(batch)

        return changing

    around(program._step, "_compute", make)


def layer_in_bf16(program: Program) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, self.weight, self.bias).float()

    layer = module_of(program, "9")
    layer.forward = MethodType(forward, layer)


def clipped_twice(program: Program) -> None:
    def make(clip: Callable) -> Callable:
        def twice(values: list[Tensor]) -> None:
            for _ in range(2):
                clip(values)
                torch._foreach_mul_([value.grad for value in values], 0.9)

        return twice

    around(program._step, "clip", make)


def state_of_the_step_before(program: Program) -> None:
    def make(step: Callable) -> Callable:
        def forgetful() -> None:
            before = {key: value["momentum_buffer"].clone() for key, value in program.optimizer.state.items()}
            step()
            for key, value in before.items():
                program.optimizer.state[key]["momentum_buffer"].copy_(value)

        return forgetful

    around(program.optimizer, "step", make)


def transposed_copy(program: Program) -> None:
    layer = module_of(program, "9")
    layer.forward = lambda x: F.linear(x, layer.weight.t().reshape(layer.weight.shape), layer.bias)


def average_decay_off(program: Program) -> None:
    around(
        program._step,
        "update_average",
        lambda _: lambda averages, values: torch._foreach_lerp_(averages, [v.detach() for v in values], 0.11),
    )


def rate_off(program: Program) -> None:
    def make(step: Callable) -> Callable:
        def off() -> None:
            group = program.optimizer.param_groups[0]
            before = group["lr"]
            group["lr"] = 1.2 * before
            step()
            group["lr"] = before

        return off

    around(program.optimizer, "step", make)
