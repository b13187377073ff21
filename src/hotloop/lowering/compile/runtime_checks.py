"""Looks, before a compiled program runs, at what a batch indexes: labels, tokens, places.

Compiled programs check an index within their loops. What a loop throws ends the process where several threads share it,
and names neither layer nor sample elsewhere. So a batch with an index out of bounds is left to the eager step, whose error
does.
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

from hotloop.errors import PlanError
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.compile.decompositions import mutated_nodes
from hotloop.lowering.compile.guards import constant_contents

aten = torch.ops.aten

_LARGE_INDEX = 500_000
"""Numbers of an array; to look through more would take longer than to look at each batch of a short run."""

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class IndexRange:
    """What an index may be: from `least` to below `size`, or `ignored`."""

    size: int
    least: int = 0
    ignored: int | None = None

    def contains(self, index: Tensor) -> bool:
        """Whether an index on the CPU is in them, in about 2 us where it is small."""
        values = index.numpy()
        if not self.least:  # one look: as numbers without a sign, negative ones are larger than any size
            if np.maximum.reduce(values.view(_UNSIGNED[values.itemsize]), axis=None, initial=0) < self.size:
                return True
            if self.ignored is None:
                return False
        values = values if self.ignored is None else values[values != self.ignored]
        return bool(values.size == 0 or (self.least <= values.min() and values.max() < self.size))


class IndexBounds:
    """The indices of a captured step that follow from its batch alone, with what they may be.

    Those that a model computes from its weights are its own affair; so are values that a Task draws.
    """

    def __init__(self, captured: CapturedStep, given: int) -> None:
        """
        Args:
            given: how many of the graph's inputs, the last ones, are tensors of the batch.
        """
        nodes = list(captured.graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        written = mutated_nodes(nodes)
        known, batch = _batch_dependents(nodes, inputs[len(inputs) - given :], written)
        every = [(_index_source(node, written), bounds) for one in nodes for node, bounds in _indices_in(one)]
        found = list(dict.fromkeys((node, bounds) for node, bounds in every if node in known and node in batch))
        self._bounds = [bounds for _, bounds in found]
        self._places, self._values = _compile_nodes(captured.graph, inputs, [node for node, _ in found])
        first = len(inputs) - given
        self._columns = [inputs.index(node) - first if node.op == "placeholder" else None for node, _ in found]

    def is_within(self, flat: Sequence[Tensor]) -> bool:
        """Whether all are in bounds, given the inputs of the graph."""
        values = self._values(*[flat[place] for place in self._places])
        return all(map(IndexRange.contains, self._bounds, values))

    def are_all_within(self, columns: Sequence[Tensor]) -> bool:
        """Whether all rows of arrays surely are, of which batches have some each: 20 us for 60,000 labels.

        It isn't known where an index is computed from a batch, and not looked for in large arrays.

        Args:
            columns: the arrays, in the order of a batch's tensors.
        """
        indexed = [columns[place] for place in self._columns if place is not None]
        if len(indexed) < len(self._columns) or any(column.numel() > _LARGE_INDEX for column in indexed):
            return False
        return all(map(IndexRange.contains, self._bounds, indexed))


def _batch_dependents(nodes: Sequence[Node], batch: Sequence[Node], written: set[Node]) -> tuple[set[Node], set[Node]]:
    """What follows from the batch and from whole numbers that are given, by whole numbers, and what needs the batch."""
    known, needing = set(batch) - written, set(batch)
    for node in nodes:
        given = node.op == "get_attr" or (
            _is_deterministic(node) and _is_integral(node) and known.issuperset(node.all_input_nodes)
        )
        if given and node not in written:
            known.add(node)
        if not needing.isdisjoint(node.all_input_nodes):
            needing.add(node)
    return known, needing


def _is_deterministic(node: Node) -> bool:
    """Whether it is given, or computed in the same way each time, and changes nothing."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "placeholder" or target is operator.getitem
    made = target.overloadpacket.__name__.startswith(("empty", "new_empty"))  # of whatever was in memory
    return not (made or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags)


def _is_integral(node: Node) -> bool:
    """Whether it is of whole numbers."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(one, Tensor) and not (one.is_floating_point() or one.is_complex()) for one in values)


def _index_source(node: Node, written: set[Node]) -> Node:
    """Where its values come from, if it only arranges them."""
    while node.target in _RESHAPING_OPS and node not in written:
        node = node.all_input_nodes[0]
    return node


_RESHAPING_OPS = (
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default, aten.detach.default),
)


def _compile_nodes(
    graph: GraphModule, inputs: Sequence[Node], wanted: Sequence[Node]
) -> tuple[list[int], Callable[..., Sequence[Tensor]]]:
    """The places of the inputs that some nodes need, and a function from these to the nodes' values."""
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
    """The indices of an operation, with what they may be; none where shapes aren't known."""
    if node.op != "call_function" or not all(_has_known_shape(one) for one in node.all_input_nodes):
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
    """Whether its shape is, where it is a tensor."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return all(isinstance(size, int) for size in value.shape)
    return value is not None or node.op != "call_function"


def _indexed_tensor(node: Node) -> Tensor:
    """What is looked into, without content."""
    looked_into: Any = node.args[0]
    return looked_into.meta["val"]


def _indexed_size(node: Node, dimension: Any) -> int:
    shape = _indexed_tensor(node).shape
    return shape[dimension] if shape else 1


class CaptureRecheck:
    """What a step did when it was captured, to be held against what it does when it is due.

    Args:
        captured: before anything is rewritten in it.
        trace: captures the step anew, on such a batch.

    Attributes:
        due: whether to look before the next step.
    """

    def __init__(self, captured: CapturedStep, trace: Callable[[Any], CapturedStep]) -> None:
        self._before, self._trace = _fingerprint(captured), trace
        self.due = False

    def has_changed(self, batch: Any) -> bool:
        """Looks where that is due, which takes as long as one trace; False elsewhere."""
        if not self.due:
            return False
        self.due = False
        try:
            return _fingerprint(self._trace(batch)) != self._before
        except PlanError:  # it can't be captured any more
            return True


def recheck_count(watched: bool, steps: int | None, batches: int | None) -> int:
    """How often a run of so many steps sees whether callbacks have changed what was compiled: once in an epoch."""
    return math.ceil(steps / batches) if watched and steps and batches else 0


def _fingerprint(captured: CapturedStep) -> tuple[Any, ...]:
    return captured.graph.code, constant_contents(captured.graph), captured.scalars, captured.gradients
