"""Distances of tensors, computed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def to_float64(value: Any) -> Tensor:
    """Returns the value as float64 on the CPU, strided and real; counts stay integers."""
    exact = torch.int64 if isinstance(value, int) else torch.float64
    tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=exact)
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def difference_norm(value: Tensor, true: Tensor) -> float:
    """Returns the norm of the difference of two tensors of equal shape; NaN or infinity on both sides is equal."""
    return math.hypot(
        *(_slice_difference_norm(to_float64(mine), to_float64(theirs)) for mine, theirs in slices(value, true))
    )


SLICE = 2**20
"""Numbers that are converted to float64 at once: one layer may have most of a network's weights."""


def slices(value: Tensor, true: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields both tensors in flat parts of up to `SLICE` numbers; others than strided tensors as a whole."""
    if value.layout != torch.strided or true.layout != torch.strided:
        yield value, true
    else:
        yield from zip(value.flatten().split(SLICE), true.flatten().split(SLICE), strict=True)


def _slice_difference_norm(value: Tensor, true: Tensor) -> float:
    off = tensor_norm(value - true)
    if math.isfinite(off):
        return off
    same = torch.isclose(value, true, rtol=0.0, atol=0.0, equal_nan=True)
    return tensor_norm(torch.where(same, 0.0, value - true))


def tensor_norm(value: Tensor) -> float:
    """Returns the Euclidean norm, computed in float64."""
    return float(torch.linalg.vector_norm(value.double()))
