"""Checks for tensors without separate memory per element: sparse, quantized, expanded or overlapping."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop.errors import TaskError


def check_memory(model: nn.Module, owner: str = "model") -> None:
    """Rejects tensors that a checkpoint can't store, and parameters that an optimizer can't update.

    Raises:
        TaskError: a tensor is sparse or quantized, or a trainable parameter has elements that share memory.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for what, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, value in tensors.items():
            if not is_lazy(value) and (value.layout is not torch.strided or value.is_quantized):
                kind = "quantized" if value.is_quantized else f"sparse ({value.layout})"
                raise TaskError(
                    f"the {what} {name!r} of the {owner} is {kind}",
                    expected="a dense tensor, which a checkpoint can hold",
                    fix="register the tensors that it is made of, such as its indices and values, as buffers, and "
                    "build it from them in the forward pass",
                )
    for name, value in parameters.items():
        if value.requires_grad and not is_lazy(value) and has_overlap(value):
            raise TaskError(
                f"elements of the parameter {name!r} of the {owner} share memory: its shape is {tuple(value.shape)} and its "
                f"strides are {value.stride()}",
                expected="a parameter with memory for each element, which an optimizer can update",
                fix="make it from a clone, or expand it in the forward pass",
            )


def has_overlap(value: Tensor) -> bool:
    """Returns whether two elements of a tensor share memory, as in an expanded tensor."""
    dims = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether two dense tensors share the memory of any element."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not (one.numel() and other.numel()):
        return False
    first, second = _byte_range(one), _byte_range(other)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    if one.itemsize != other.itemsize:
        return True
    places = torch.arange(max(first.stop, second.stop) // one.itemsize)
    first_elements, second_elements = (
        places.as_strided(value.shape, value.stride(), value.storage_offset()).flatten() for value in (one, other)
    )
    return bool(torch.isin(first_elements, second_elements).any())


def _byte_range(value: Tensor) -> range:
    reach = sum(stride * (size - 1) for stride, size in zip(value.stride(), value.shape, strict=True))
    first = int(value.storage_offset())
    return range(first * value.itemsize, (first + int(reach) + 1) * value.itemsize)


def is_gapless(value: Tensor) -> bool:
    """Whether a tensor's elements fill a contiguous range of memory, each once, in any order, as fused kernels need."""
    filled = 1
    dimensions = [(stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1]
    for stride, size in sorted(dimensions):
        if stride != filled:
            return value.numel() == 0
        filled *= size
    return True
