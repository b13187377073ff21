"""Whether two batches are equal in form, strides and bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hotloop.errors import type_name


def batch_leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a batch with their paths: `batch[0]`, `batch['x']`."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from batch_leaves(item, f"{path}[{key!r}]")
    elif type(tree) in (tuple, list) or hasattr(tree, "_fields"):
        for place, item in enumerate(tree):
            yield from batch_leaves(item, f"{path}[{place}]")
    else:
        yield path, tree


def batch_form(batch: Any) -> tuple[str, ...]:
    """Returns each tensor's path, dtype and shape without the batch dimension, and other leaves as they are."""
    return tuple(
        f"{path} is {str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape[1:])}"
        if isinstance(leaf, Tensor)
        else f"{path} is {leaf!r}"
        for path, leaf in batch_leaves(batch)
    )


def first_difference(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str]:
    for mine, others in zip(one, other, strict=False):
        if mine != others:
            return mine, others
    return f"there are {len(one)} leaves", f"{len(other)}"


def batch_difference(one: Any, other: Any) -> str:
    """Returns where two batches differ in form, strides or bits; empty if they are equal."""
    mine, others = batch_form(one), batch_form(other)
    if mine != others:
        return " where it should be ".join(first_difference(mine, others))
    if _containers(one) != _containers(other):
        return f"{type_name(one)} of other containers"
    for (path, a), (_, b) in zip(batch_leaves(one), batch_leaves(other), strict=True):
        if not isinstance(a, Tensor):
            continue  # part of the form
        if a.shape != b.shape or a.stride() != b.stride():
            return f"{path} has strides {a.stride()} where a copy has {b.stride()}"
        if not raw_bytes(a).equal(raw_bytes(b)):
            return f"{path} holds other values"
    return ""


def _containers(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return type(tree), [_containers(item) for item in tree.values()]
    return (type(tree), [_containers(item) for item in tree]) if isinstance(tree, tuple | list) else None


def raw_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
