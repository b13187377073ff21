"""Products of groups of rows with a matrix each, as in mixtures of experts, for float64 and for fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hotloop.core.patches import patch_attribute

_ALIGNED = 16
"""Bytes. The row stride of the result is a multiple, except on AMD's GPUs."""


def empty_product(left: Tensor, right: Tensor, ends: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the uninitialised result; the row stride is a multiple of 16 bytes."""
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
    """Computes `torch._grouped_mm` group by group, in any dtype; rows or columns without a group are zeros.

    Args:
        left: (rows, k) or (groups, rows, k).
        right: (k, columns) or (groups, k, columns).
        offs: (groups,), the end of each group: of rows if `left` is one matrix, of columns if `right` is, of k if both
            are; None if neither is.
    """
    out = empty_product(left, right, offs, out_dtype or left.dtype).zero_()
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
    """Returns the operation of a graph, or its replacement for float64 operands, which torch doesn't accept."""
    grouped = function is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64
    return multiply_groups if grouped else function


@contextmanager
def traceable_groups() -> Iterator[None]:
    """Makes the meta kernel of `torch.nn.functional.grouped_mm` accept any dtype, with the strides of the CPU's kernel.

    The kernel multiplies fp32 as well as bf16. Its meta kernel refuses fp32, and returns other strides (torch 2.13, 2.14).
    Upstream: pytorch/pytorch#172440 (alignment). Test without the patch: `test_torch_s_meta_kernel_refuses_fp32`.
    """
    from torch import _meta_registrations

    with patch_attribute(_meta_registrations, "_meta_grouped_mm_common", _multiply_any_dtype):
        yield


def _multiply_any_dtype(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_b: Any, **options: Any) -> Tensor:
        if scale_a is not None:
            return original(mat_a, mat_b, scale_a=scale_a, scale_b=scale_b, **options)
        return empty_product(mat_a, mat_b, options.get("offs"), options.get("out_dtype") or mat_a.dtype)

    return product
