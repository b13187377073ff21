"""Checks the indices of a batch (labels, tokens, places) before a compiled program runs.

Compiled programs check an index within their loops. In a loop of several threads a failed check ends the process, and
elsewhere its error names neither layer nor sample. So the eager step runs a batch with an index out of bounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from hotloop.core.torch_private import OpOverload
from hotloop.errors import PlanError
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.compile.guards import constant_contents
from hotloop.lowering.compile.inductor_patches import mutated_nodes

aten = torch.ops.aten

_LARGE_INDEX = 500_000
"""Elements of an array; a check of a larger one would take longer than checking each batch of a short run."""

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class IndexRange:
    """The valid values of an index: from `least` to below `size`, and `ignored`."""

    size: int
    least: int = 0
    ignored: int | None = None

    def contains(self, index: Tensor) -> bool:
        """Whether all values of an index on the CPU are valid; takes about 2 us for small indices."""
        values = index.numpy()
        if not self.least:  # one pass: as unsigned integers, negative ones are larger than any size
            if np.maximum.reduce(values.view(_UNSIGNED[values.itemsize]), axis=None, initial=0) < self.size:
                return True
            if self.ignored is None:
                return False
        values = values if self.ignored is None else values[values != self.ignored]
        return bool(values.size == 0 or (self.least <= values.min() and values.max() < self.size))


class IndexBounds:
    """The indices of a captured step that follow from its batch alone, with their valid ranges.

    Indices that a model computes from its weights, or that a Task draws, aren't checked.
    """

    def __init__(self, captured: CapturedStep, given: int) -> None:
        """Args:
        given: number of the graph's last inputs that are tensors of the batch.
        """
        nodes = list(captured.graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        mutated, first = mutated_nodes(nodes), len(inputs) - given
        known, batch = _batch_dependents(nodes, inputs[first:], mutated)
        indices = [(_index_source(index, mutated), bounds) for node in nodes for index, bounds in _indices_in(node)]
        checked = list(dict.fromkeys((node, bounds) for node, bounds in indices if node in known and node in batch))
        self._bounds = [bounds for _, bounds in checked]
        self._places, self._values = _compile_nodes(captured.graph, inputs, [node for node, _ in checked])
        self._columns = [inputs.index(node) - first if node.op == "placeholder" else None for node, _ in checked]

    def is_within(self, flat: Sequence[Tensor]) -> bool:
        """Whether all indices are in bounds, for the inputs of the graph."""
        values = self._values(*[flat[place] for place in self._places])
        return all(map(IndexRange.contains, self._bounds, values))

    def are_all_within(self, columns: Sequence[Tensor]) -> bool:
        """Whether all rows of the arrays, from which batches are taken, are in bounds: 20 us for 60,000 labels.

        False if an index is computed from a batch, and for large arrays, which aren't checked.

        Args:
            columns: the arrays, in the order of a batch's tensors.
        """
        indexed = [columns[place] for place in self._columns if place is not None]
        if len(indexed) < len(self._columns) or any(column.numel() > _LARGE_INDEX for column in indexed):
            return False
        return all(map(IndexRange.contains, self._bounds, indexed))


def _batch_dependents(nodes: Sequence[Node], batch: Sequence[Node], mutated: set[Node]) -> tuple[set[Node], set[Node]]:
    """Returns the nodes that integer operations compute from batch and constants, and all nodes that need the batch."""
    known, dependents = set(batch) - mutated, set(batch)
    for node in nodes:
        is_known = node.op == "get_attr" or (
            _is_deterministic(node) and _is_integral(node) and known.issuperset(node.all_input_nodes)
        )
        if is_known and node not in mutated:
            known.add(node)
        if not dependents.isdisjoint(node.all_input_nodes):
            dependents.add(node)
    return known, dependents


def _is_deterministic(node: Node) -> bool:
    """Whether the node is an input, or a function of its operands without side effects."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return node.op == "placeholder" or target is operator.getitem
    is_uninitialized = target.overloadpacket.__name__.startswith(("empty", "new_empty"))
    return not (is_uninitialized or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)


def _is_integral(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(item, Tensor) and not (item.is_floating_point() or item.is_complex()) for item in values)


def _index_source(node: Node, mutated: set[Node]) -> Node:
    """Returns the node from which reshaping operations take the values."""
    while node.target in _RESHAPING_OPS and node not in mutated:
        node = node.all_input_nodes[0]
    return node


_RESHAPING_OPS = (
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default, aten.detach.default),
)


def _compile_nodes(
    graph: GraphModule, inputs: Sequence[Node], wanted: Sequence[Node]
) -> tuple[list[int], Callable[..., Sequence[Tensor]]]:
    """Returns the places of the inputs that the wanted nodes need, and a function from these inputs to their values."""
    needed, left = set[Node](), list(wanted)
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    part, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in wanted))
    return [place for place, node in enumerate(inputs) if node in needed], GraphModule(graph, part).forward


def _indices_in(node: Node) -> Iterator[tuple[Node, IndexRange]]:
    """Yields the indices of an operation with their valid ranges; none if shapes are unknown."""
    if node.op != "call_function" or not all(map(_has_known_shape, node.all_input_nodes)):
        return
    if node.target in _EMBEDDING_OPS:
        yield node.args[1], IndexRange(_indexed_size(node, 0))  # type: ignore[misc]
    elif node.target in _GATHER_OPS:
        yield node.args[2], IndexRange(_indexed_size(node, node.args[1]))  # type: ignore[misc]
    elif node.target in _LOSS_OPS:
        ignored: Any = node.args[4]
        yield node.args[1], IndexRange(_indexed_size(node, min(1, _indexed_tensor(node).ndim - 1)), ignored=ignored)  # type: ignore[misc]
    elif node.target in _INDEX_OPS:
        places: Any = node.args[1]
        for dimension, index in enumerate(places):
            if index is not None and index.meta["val"].dtype in (torch.int32, torch.int64):
                size = _indexed_size(node, dimension)
                yield index, IndexRange(size, -size)


_EMBEDDING_OPS = (aten.embedding.default, aten._embedding_bag.default, aten._embedding_bag_forward_only.default)

_LOSS_OPS = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)

_INDEX_OPS = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default)

_GATHER_OPS = (
    *(aten.gather.default, aten.index_select.default, aten.index_add.default, aten.index_add_.default),
    *(aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value),
    *(aten.scatter_add.default, aten.scatter_add_.default),
)


def _has_known_shape(node: Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return all(isinstance(size, int) for size in value.shape)
    return value is not None or node.op != "call_function"


def _indexed_tensor(node: Node) -> Tensor:
    source: Any = node.args[0]
    return source.meta["val"]


def _indexed_size(node: Node, dimension: Any) -> int:
    shape = _indexed_tensor(node).shape
    return shape[dimension] if shape else 1


class CaptureRecheck:
    """Compares a new capture of a step with its first capture, when due.

    Args:
        captured: the first capture, before any rewrite.
        trace: captures the step again on a batch.

    Attributes:
        due: whether to compare before the next step.
    """

    def __init__(self, captured: CapturedStep, trace: Callable[[Any], CapturedStep]) -> None:
        self._before, self._trace = _fingerprint(captured), trace
        self.due = False

    def has_changed(self, batch: Any) -> bool:
        """Captures and compares, if due, which takes as long as one trace; False otherwise."""
        if not self.due:
            return False
        self.due = False
        try:
            return _fingerprint(self._trace(batch)) != self._before
        except PlanError:  # the step can't be captured any more
            return True


def recheck_count(watched: bool, steps: int | None, batches: int | None) -> int:
    """Returns how often a run checks whether callbacks changed the compiled step: once in an epoch."""
    return math.ceil(steps / batches) if watched and steps and batches else 0


def _fingerprint(captured: CapturedStep) -> tuple[Any, ...]:
    return captured.graph.code, constant_contents(captured.graph), captured.scalars, captured.gradients
