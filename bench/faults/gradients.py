"""Faults of gradients: left over, scaled, rounded, stale, or clipped otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.faults.planting import Planted, a_factor, a_parameter, around, each
from bench.graph_mutations import magnitude
from hotloop.core.random.rng import generator_for
from hotloop.lowering.program import Program


def zero_grad_skipped(program: Program, draws: random.Random) -> Planted:
    turn, every = each(draws)
    around(program._step, "_clear_gradients", lambda clear: lambda: None if turn() else clear())
    return f"each {every} steps", 1 / every


def loss_scaled(program: Program, draws: random.Random) -> Planted:
    factor, size = a_factor(draws)
    around(program._step, "_backward_of", lambda backward: lambda loss: backward(loss * factor))
    return "the loss", size


def gradient_scaled(program: Program, draws: random.Random) -> Planted:
    factor, size = a_factor(draws)
    name = _of_gradient(program, draws, lambda value: value.mul_(factor))
    return name, size


def gradient_rounded(program: Program, draws: random.Random) -> Planted:
    dtype, size = draws.choice(((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)))
    name = _of_gradient(program, draws, lambda value: value.copy_(value.to(dtype)))
    return name, size


def gradient_noisy(program: Program, draws: random.Random) -> Planted:
    size, generator = magnitude(draws), generator_for(draws.getrandbits(40), "noise")

    def noisy(value: Tensor) -> None:
        value.add_(size * value.square().mean().sqrt() * torch.randn(value.shape, generator=generator))

    return _of_gradient(program, draws, noisy), size


def gradient_stale(program: Program, draws: random.Random) -> Planted:
    """That of the step before, as in a race between backward and the update."""
    before: list[Tensor] = []

    def older(value: Tensor) -> None:
        before.append(value.clone())
        value.copy_(before.pop(0) if len(before) > 1 else before[0])

    return _of_gradient(program, draws, older), None


def _of_gradient(program: Program, draws: random.Random, change: Callable[[Tensor], Any]) -> str:
    """Changes the gradient of one parameter before it is clipped."""
    name, parameter = a_parameter(program, draws)

    def make(clip: Callable) -> Callable:
        def changed(parameters: list[Tensor]) -> None:
            if parameter.grad is not None:
                change(parameter.grad)
            clip(parameters)

        return changed

    around(program._step, "clip", make)
    return name


def clipped_twice(program: Program, draws: random.Random) -> Planted:
    if program.parts.task.clip_norm is None and program.parts.task.clip_value is None:
        return None

    def make(clip: Callable) -> Callable:
        def twice(parameters: list[Tensor]) -> None:
            clip(parameters)
            for value in parameters:
                if value.grad is not None:
                    value.grad.mul_(2)  # as if by each of two ranks
            clip(parameters)

        return twice

    around(program._step, "clip", make)
    return "the gradients", None


def clip_limit_off(program: Program, draws: random.Random) -> Planted:
    task = program.parts.task
    factor, size = a_factor(draws)
    if task.clip_norm is not None:
        limit = task.clip_norm * factor
        program._step.clip = lambda values: torch.nn.utils.clip_grad_norm_(values, limit)  # type: ignore  # a fault is planted
    elif task.clip_value is not None:
        limit = task.clip_value * factor
        program._step.clip = lambda values: torch.nn.utils.clip_grad_value_(values, limit)  # type: ignore  # a fault is planted
    else:
        return None
    return "the limit", size


def not_clipped(program: Program, draws: random.Random) -> Planted:
    if program.parts.task.clip_norm is None and program.parts.task.clip_value is None:
        return None
    turn, every = each(draws)
    around(program._step, "clip", lambda clip: lambda values: None if turn() else clip(values))
    return f"each {every} steps", 1 / every


FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = {
    "zero_grad skipped": zero_grad_skipped,
    "loss scaled": loss_scaled,
    "gradient scaled": gradient_scaled,
    "gradient rounded": gradient_rounded,
    "gradient noisy": gradient_noisy,
    "gradient of the step before": gradient_stale,
    "clipped twice": clipped_twice,
    "clip limit off": clip_limit_off,
    "not clipped": not_clipped,
}
