"""Functions on batches as trees: a tensor, or tuples, lists and dicts of tensors; other leaves stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(
    function: Callable[[Tensor], Tensor], tree: Any, others: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Returns `tree` with `function` applied to tensors and `others` to other leaves; keeps container types."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):  # a tuple with some tensors that must stay on the CPU
        return others(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item, others) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item, others) for item in tree)
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {key: map_tensors(function, item, others) for key, item in tree.items()})
    return others(tree)


def _rebuild_mapping(original: Mapping, items: dict) -> Any:
    """Returns a mapping of the original's class, such as a tokenizer's, or a plain dict."""
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def tree_tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tree_tensors(item)
    elif isinstance(tree, Mapping):  # last, as the slowest check
        for item in tree.values():
            yield from tree_tensors(item)


def flatten_tree(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Returns the leaves of a tree, in order, and a function that builds the same tree of other leaves."""
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
    """Returns `tree` with copied tensors of the same strides: `torch.clone` closes the gaps of a slice."""
    return map_tensors(_copy_tensor, tree)


def _copy_tensor(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    if tensor.layout != torch.strided or copy.stride() == tensor.stride() or not tensor.numel():
        return copy
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def named_columns(columns: Any, name: str) -> list[tuple[str, Tensor]]:
    """Returns a table's columns with their names in errors: `data[0]`, `data['x']`, or `data` for one column."""
    if isinstance(columns, Mapping):
        return [(f"{name}[{key!r}]", column) for key, column in columns.items()]
    if isinstance(columns, tuple | list):
        return [(f"{name}[{place}]", column) for place, column in enumerate(columns)]
    return [(name, columns)]


def to_device(tree: Any, device: torch.device) -> Any:
    """Returns `tree` on `device`; other leaves move by their own `to`, if any."""
    non_blocking = device.type != "cpu"  # a copy to the CPU must have ended before its first read
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=non_blocking)
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=non_blocking),
        tree,
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
    )


def batch_length(tree: Any) -> int:
    """Returns the number of samples: the length of the first tensor, else of the first sized item."""
    for tensor in tree_tensors(tree):
        return tensor.shape[0] if tensor.ndim else 1
    first = next(iter(tree.values())) if isinstance(tree, Mapping) else tree
    return len(first) if hasattr(first, "__len__") else 1


def batch_inputs(batch: Any) -> Any:
    """Returns the model's inputs of an `(inputs..., target)` batch: one input, or a tuple of several."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch[0] if len(batch) == 2 else tuple(batch[:-1])
    return batch


def replace_inputs(batch: Any, inputs: Any) -> Any:
    """Returns `batch` with other inputs; the inverse of `batch_inputs`."""
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return (inputs, batch[-1]) if len(batch) == 2 else (*inputs, batch[-1])
    return inputs


def apply_to_inputs(function: Callable[[Any], Any], batch: Any) -> Any:
    """Returns `batch` with `function` applied to its inputs."""
    return replace_inputs(batch, function(batch_inputs(batch)))
