"""Faults of the model: statistics, precision, modes and weights of layers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.faults.planting import Planted, a_factor, around, each
from bench.graph_mutations import magnitude
from hotloop.data.batch_tree import map_tensors
from hotloop.lowering.program import Program


def norm_not_updated(program: Program, draws: random.Random) -> Planted:
    turn, every = each(draws)
    return _of_norms(
        program, draws, lambda module: 0.0 if turn() else module.momentum, f"each {every} steps", 1 / every
    )


def norm_momentum_off(program: Program, draws: random.Random) -> Planted:
    factor, size = a_factor(draws)
    return _of_norms(program, draws, lambda module: module.momentum * factor, "momentum", size)


def _of_norms(program: Program, draws: random.Random, change: Callable, where: str, size: float) -> Planted:
    norms = [(n, m) for n, m in program.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return None
    name, module = draws.choice(norms)

    def make(forward: Callable) -> Callable:
        def changed(x: Tensor) -> Tensor:
            before, module.momentum = module.momentum, change(module)
            out = forward(x)
            module.momentum = before
            return out

        return changed

    around(module, "forward", make)
    return f"{name} {where}", size


def _leaf(program: Program, draws: random.Random, kinds: Any = nn.Module) -> tuple[str, nn.Module] | None:
    found = [
        (name, module)
        for name, module in program.model.named_modules()
        if isinstance(module, kinds) and not list(module.children()) and name
    ]
    return draws.choice(found) if found else None


_WITH_WEIGHTS = (nn.Linear, nn.Conv2d, nn.LSTM, nn.GRU)


def layer_in_bf16(program: Program, draws: random.Random) -> Planted:
    chosen = _leaf(program, draws, _WITH_WEIGHTS)
    if chosen is None:
        return None
    name, module = chosen

    def make(forward: Callable) -> Callable:
        def narrow(*args: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out = forward(*args)
            return map_tensors(Tensor.float, out)

        return narrow

    around(module, "forward", make)
    return name, 2.0**-9


def output_scaled(program: Program, draws: random.Random) -> Planted:
    chosen = _leaf(program, draws)
    if chosen is None:
        return None
    name, module = chosen
    factor, size = a_factor(draws)
    module.register_forward_hook(lambda m, inputs, out: map_tensors(lambda value: value * factor, out))
    return name, size


def epsilon_off(program: Program, draws: random.Random) -> Planted:
    norms = [(n, m) for n, m in program.model.named_modules() if hasattr(m, "eps")]
    if not norms:
        return None
    name, module = draws.choice(norms)
    size = magnitude(draws)
    module.eps = size  # type: ignore  # a fault is planted
    return f"{name} eps", size


def rate_of_dropout_off(program: Program, draws: random.Random) -> Planted:
    chosen = _leaf(program, draws, nn.Dropout)
    if chosen is None:
        return None
    name, module = chosen
    factor, size = a_factor(draws)
    module.p = min(1.0, module.p * factor)  # type: ignore  # a fault is planted
    return name, size


def not_training(program: Program, draws: random.Random) -> Planted:
    """A module left in evaluation mode."""
    chosen = _leaf(program, draws, (nn.Dropout, nn.modules.batchnorm._BatchNorm))
    if chosen is None:
        return None
    name, module = chosen
    module.train = lambda mode=True: module  # type: ignore  # a fault is planted
    module.training = False
    return name, None


def transposed_copy(program: Program, draws: random.Random) -> Planted:
    """A layer that computes with a transposed copy of its weights, read as if it were not."""
    chosen = _leaf(program, draws, nn.Linear)
    if chosen is None:
        return None
    name, module = chosen
    module.forward = lambda x: F.linear(  # type: ignore  # a fault is planted
        x, module.weight.t().reshape(module.weight.shape), module.bias
    )
    return name, None


def stale_weights(program: Program, draws: random.Random) -> Planted:
    """A layer that computes with weights of so many steps before."""
    chosen = _leaf(program, draws, (nn.Linear, nn.Conv2d))
    if chosen is None:
        return None
    name, module = chosen
    age = draws.choice((1, 2, 4))
    before: deque[Tensor] = deque(maxlen=age + 1)

    def make(forward: Callable) -> Callable:
        def older(x: Tensor) -> Any:
            now = module.weight.data
            before.append(now.clone())
            module.weight.data = before[0].clone()
            out = forward(x)
            module.weight.data = now
            return out

        return older

    around(module, "forward", make)
    return f"{name} of {age} steps before", float(age)


FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = {
    "BatchNorm statistics not updated": norm_not_updated,
    "BatchNorm momentum off": norm_momentum_off,
    "layer in bf16": layer_in_bf16,
    "layer's output scaled": output_scaled,
    "layer's epsilon off": epsilon_off,
    "dropout rate off": rate_of_dropout_off,
    "module in evaluation mode": not_training,
    "transposed weight copy": transposed_copy,
    "stale weights": stale_weights,
}
