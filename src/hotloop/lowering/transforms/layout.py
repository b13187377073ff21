"""The layout axis: images and their weights with channels last in memory, on which convolutions may run faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop.data.batch_tree import map_tensors
from hotloop.lowering.context import LoweringContext
from hotloop.task import StepResult

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def apply_layout(parts: LoweringContext) -> LoweringContext:
    """Lays out each parameter, and each tensor of a batch, of 4 or 5 dimensions channels last; shapes stay the same."""
    if parts.plan.layout == "contiguous":
        return parts
    for value in [*parts.model.parameters(), *parts.model.buffers()]:
        value.data = to_channels_last(value.data)
    compute = parts.compute

    def compute_channels_last(model: nn.Module, batch: Any) -> StepResult:
        with LogicalOrderDraws():
            return compute(model, map_tensors(to_channels_last, batch))

    return replace(parts, compute=compute_channels_last)


def to_channels_last(tensor: Tensor) -> Tensor:
    """Returns `tensor` with channels last in memory, if it has 4 or 5 dimensions."""
    layout = _FORMATS.get(tensor.ndim)
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


class LogicalOrderDraws(TorchFunctionMode):
    """Draws random numbers in the order of dimensions instead of memory, so that a layout doesn't change them."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _DRAWING or not any(map(_is_channels_last, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function in _DRAWN_INTO:
            drawn = torch.empty_like(args[0], memory_format=torch.contiguous_format)
            return args[0].copy_(function(drawn, *args[1:], **kwargs))
        if function in _DRAWN_FROM and not kwargs.get("inplace"):
            args, kwargs = map_tensors(Tensor.contiguous, args), map_tensors(Tensor.contiguous, kwargs)
            return map_tensors(to_channels_last, function(*args, **kwargs))
        return function(*args, **kwargs)


_DRAWN_FROM = {
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.dropout, torch.native_dropout, torch.alpha_dropout, F.alpha_dropout),
}
"""Functions that draw in the order of memory; others, such as `bernoulli`, draw in the order of dimensions."""

_DRAWN_INTO = {
    *(Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_),
    *(Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
}
_DRAWING = {F.dropout} | _DRAWN_FROM | _DRAWN_INTO


def _is_channels_last(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim in _FORMATS and not value.is_contiguous()


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Runs `F.dropout` with a mask drawn in the order of the dimensions."""
    if not training or p in (0, 1):
        return F.dropout(x, p, training, inplace)
    keep = torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(1 - p).div_(1 - p)
    return x.mul_(to_channels_last(keep)) if inplace else x * to_channels_last(keep)
