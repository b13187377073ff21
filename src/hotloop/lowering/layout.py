"""The layout axis: images and their weights with the channels last in memory, which convolutions may run faster on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop.data.tree import map_tensors
from hotloop.lowering.ingredients import Ingredients
from hotloop.task import Computed

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_layout(parts: Ingredients) -> Ingredients:
    """Channels last for each parameter, and each tensor of a batch, with 4 or 5 dimensions; shapes stay as they are."""
    if parts.plan.layout == "contiguous":
        return parts
    for value in [*parts.model.parameters(), *parts.model.buffers()]:
        value.data = channels_last(value.data)
    compute = parts.compute

    def laid_out(model: nn.Module, batch: Any) -> Computed:
        with DrawsInOrder():
            return compute(model, map_tensors(channels_last, batch))

    return replace(parts, compute=laid_out)


def channels_last(tensor: Tensor) -> Tensor:
    """`tensor` with its channels last in memory, if it has 4 or 5 dimensions."""
    layout = _FORMATS.get(tensor.ndim)
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


class DrawsInOrder(TorchFunctionMode):
    """Draws random numbers in the order of the dimensions, not of the memory, so that a layout doesn't change them."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _LIKE and _is_laid_out(args):
            drawn = function(torch.empty_like(args[0], memory_format=torch.contiguous_format), *args[1:], **kwargs)
            return channels_last(drawn)
        if function is F.dropout and _is_laid_out(args):
            return _dropout(*args, **kwargs)
        return function(*args, **kwargs)


_LIKE = {torch.rand_like, torch.randn_like}


def _is_laid_out(args: tuple) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].ndim in _FORMATS and not args[0].is_contiguous()


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with a mask drawn in the order of the dimensions."""
    if not training or p in (0, 1):
        return F.dropout(x, p, training, inplace)
    keep = torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(1 - p).div_(1 - p)
    return x.mul_(channels_last(keep)) if inplace else x * channels_last(keep)
