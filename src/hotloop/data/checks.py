"""Mistakes in data that would otherwise show up hours later, or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotloop.data.tree import named_columns
from hotloop.errors import DataError

_AT_ONCE = 1 << 20
"""Numbers that are summed up at once: torch makes a copy in float64 of what it sums up so."""

_INSTEAD = (
    "remove those samples; or put a number in place of what is missing (nan_to_num) and a mask beside it, as data=(x, y,"
    " mask), for a step(model, batch) that leaves it out of the loss"
)


def check_finite(columns: Any, name: str, *, prepared: bool = False) -> None:
    """Raises DataError naming the first sample of `columns` that holds NaN or infinity."""
    for label, column in named_columns(columns, name):
        if not column.is_floating_point() or column.numel() == 0:
            continue
        # A sum is finite if all its terms are (float64 can't overflow here), and needs no mask as large as the data.
        if all(torch.isfinite(part.sum(dtype=torch.float64)) for part in column.split(_rows_at_once(column))):
            continue
        bad = ~torch.isfinite(column.flatten(1) if column.ndim > 1 else column[:, None]).all(dim=1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise DataError(
                f"{label} has NaN or infinity{' after prepare' if prepared else ''} in {int(bad.sum())} of {len(bad)}"
                f" samples, first in sample {first}",
                expected="finite numbers",
                fix="check what prepare makes of them" if prepared else _INSTEAD,
            )


def _rows_at_once(column: Tensor) -> int:
    return max(1, _AT_ONCE * len(column) // column.numel())


def check_labels(target: Tensor, classes: int, name: str, *, ignore_index: int | None = None) -> None:
    """Raises DataError naming the first label outside 0..classes-1; `ignore_index` is allowed too."""
    bad = (target < 0) | (target >= classes)
    if ignore_index is not None:
        bad &= target != ignore_index
    if bad.any():
        first = int(bad.flatten().nonzero()[0])
        sample = int(bad.nonzero()[0][0])
        raise DataError(
            f"{name} has label {int(target.flatten()[first])} in sample {sample}, but the model has {classes} outputs",
            expected=f"labels from 0 to {classes - 1}",
            fix="check the labels, or the width of the model's last layer",
        )
