"""Batches are trees: a tensor, or tuples, lists and dicts of them. Leaves that are not tensors pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(
    function: Callable[[Tensor], Tensor], tree: Any, others: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """`tree` with `function` applied to each tensor, and `others` to each other leaf; containers keep their types."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):  # a tuple whose tensors don't all belong on one device
        return others(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item, others) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item, others) for item in tree)
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {key: map_tensors(function, item, others) for key, item in tree.items()})
    return others(tree)


def _rebuild_mapping(original: Mapping, items: dict) -> Any:
    """A mapping of the original's class (tokenizers return their own, with attribute access), or a plain dict."""
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def tree_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tree_tensors(item)
    elif isinstance(tree, Mapping):  # asked last: that takes longest
        for item in tree.values():
            yield from tree_tensors(item)


def flatten_tree(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The leaves of a tree, in order, and a function that makes the same tree of other leaves."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    def unflatten(values: Iterable[Any]) -> Any:
        left = iter(values)
        return map_tensors(lambda _: next(left), tree, lambda _: next(left))

    map_tensors(note, tree, note)
    return leaves, unflatten


def copy_tree(tree: Any) -> Any:
    """`tree` with tensors of their own memory, laid out as they were: `torch.clone` closes the gaps of a slice."""
    return map_tensors(_copy_tensor, tree)


def _copy_tensor(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    if tensor.layout != torch.strided or copy.stride() == tensor.stride() or not tensor.numel():
        return copy
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def named_columns(columns: Any, name: str) -> list[tuple[str, Tensor]]:
    """The columns of a table, each with what to call it in an error: `data[0]`, `data['x']`, or `data` if alone."""
    if isinstance(columns, Mapping):
        return [(f"{name}[{key!r}]", column) for key, column in columns.items()]
    if isinstance(columns, tuple | list):
        return [(f"{name}[{place}]", column) for place, column in enumerate(columns)]
    return [(name, columns)]


def to_device(tree: Any, device: torch.device) -> Any:
    """`tree` on `device`; what is already there is not copied. Leaves of other kinds move by their own `to`, if any."""
    without_waiting = device.type != "cpu"  # what comes back must be there when it is read
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=without_waiting)
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=without_waiting),
        tree,
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
    )


def batch_length(tree: Any) -> int:
    """Samples in a batch: the length of its first tensor, else of its first sized item."""
    for tensor in tree_tensors(tree):
        return tensor.shape[0] if tensor.ndim else 1
    first = next(iter(tree.values())) if isinstance(tree, Mapping) else tree
    return len(first) if hasattr(first, "__len__") else 1


def batch_inputs(batch: Any) -> Any:
    """What the model sees of an `(inputs..., target)` batch: one input alone, or a tuple of several."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1])
    return batch


def replace_inputs(batch: Any, inputs: Any) -> Any:
    """`batch` with its inputs replaced; the inverse of `batch_inputs`."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return (inputs, batch[-1]) if len(batch) == 2 else (*inputs, batch[-1])
    return inputs


def apply_to_inputs(function: Callable[[Any], Any], batch: Any) -> Any:
    """`batch` with `function` applied to its inputs."""
    return replace_inputs(batch, function(batch_inputs(batch)))
