"""Answers for operators whose result depends on values, which fake tensors lack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INDEXED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_MASKS = (torch.bool, torch.uint8)


def answer_item(tensor: Tensor, is_of_all: bool) -> bool | int | float:
    """Returns a value for `tensor.item()`: 1, such as an optimizer's number of steps; conditions are false.

    Args:
        is_of_all: whether `torch.all` computed the tensor, which is then true: masks commonly choose everything.
    """
    if tensor.dtype == torch.bool:
        return is_of_all
    return 1.0 if tensor.is_floating_point() else 1


def with_all_elements(name: str, args: tuple[Any, ...]) -> Any:
    """Returns arguments without masks, or the result of a choice, as if all elements were chosen; None for others."""
    if name in _INDEXED and any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1]):
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in _MASKS:
                indices += [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
            else:
                indices.append(index)
        return (args[0], indices, *_spread_values(name, args, indices))
    if name == "nonzero":
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
    if name == "masked_select":
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return torch.empty(shape.numel(), dtype=args[0].dtype)
    return None


def _spread_values(name: str, args: tuple[Any, ...], indices: list[Any]) -> tuple[Any, ...]:
    """Returns the rest of the arguments; the values of a write have the number of chosen elements or are one value."""
    if "put" not in name or not isinstance(args[2], Tensor):
        return args[2:]
    values = args[2]
    chosen = max(index.numel() for index in indices if isinstance(index, Tensor))
    if values.ndim and values.shape[0] not in (1, chosen):
        values = torch.empty((chosen, *values.shape[1:]), dtype=values.dtype)
    return (values, *args[3:])
