"""Products of groups of rows with a matrix each, as in mixtures of experts: what torch's own parts don't know of them.

`torch.nn.functional.grouped_mm` multiplies in fp32 as well as in bf16, but tells a tracer that it takes bf16 alone, and of builds
for CPUs other strides than it gives (torch 2.13). In float64 there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hotloop.core.patches import patch_attribute

_ALIGNED = 16
"""Bytes that a row of the result takes a multiple of, but on AMD's GPUs."""


@contextmanager
def traceable_groups() -> Iterator[None]:
    """Meanwhile tensors without content are multiplied in any dtype, into the strides that a product with content has."""
    from torch import _meta_registrations as without_content

    with patch_attribute(without_content, "_meta_grouped_mm_common", _multiply_any_dtype):
        yield


def _multiply_any_dtype(torchs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_b: Any, **how: Any) -> Tensor:
        if scale_a is not None:
            return torchs(mat_a, mat_b, scale_a=scale_a, scale_b=scale_b, **how)
        return _empty_product(mat_a, mat_b, how.get("offs"), how.get("out_dtype") or mat_a.dtype)

    return product


def _empty_product(left: Tensor, right: Tensor, ends: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a product is written to: each row, in memory, as long as a multiple of 16 bytes."""
    stacked = left.ndim == right.ndim
    groups = [ends.shape[0] if ends is not None else left.shape[0]] if stacked else []
    shape = [*groups, left.shape[-2], right.shape[-1]]
    if torch.version.hip:
        return left.new_empty(shape, dtype=dtype)
    numbers = _ALIGNED // dtype.itemsize
    row = -(-shape[-1] // numbers) * numbers
    return left.new_empty_strided(shape, ([shape[-2] * row] if stacked else []) + [row, 1], dtype=dtype)


def multiply_groups(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """`torch._grouped_mm` by a product for each group, in any dtype; rows or columns that are of no group are zeros.

    Args:
        left: (rows, k) or (groups, rows, k).
        right: (k, columns) or (groups, k, columns).
        offs: (groups,), where each group ends: of rows where `left` is one matrix, of columns where `right` is, of k where
            both are; None where neither is.
    """
    out = _empty_product(left, right, offs, out_dtype or left.dtype).zero_()
    begin = 0
    for group, end in enumerate(offs.tolist() if offs is not None else [0] * len(left)):
        part = slice(begin, end)
        if left.ndim == right.ndim == 2:
            out[group] = left[:, part] @ right[part]
        elif left.ndim == 2:
            out[part] = left[part] @ right[group]
        elif right.ndim == 2:
            out[:, part] = left[group] @ right[:, part]
        else:
            out[group] = left[group] @ right[group]
        begin = end
    return out if bias is None else out + bias


def float64_operation(function: Any, args: Any) -> Any:
    """The operation of a graph, or what stands for it where its operands are of float64, in which torch doesn't have it."""
    grouped = function is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64
    return multiply_groups if grouped else function
