"""What torch's compiler makes of a captured graph otherwise than the eager step does, written so that both do the same."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node


def mutated_nodes(nodes: Sequence[Node]) -> set[Node]:
    """What is changed in place after it was made, by itself or through a view: what it holds can't be told from its node."""
    found = set[Node]()
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for place, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
                given = node.args[place]
                if argument.is_write and isinstance(given, Node):
                    found.update(_view_chain(given))
    return found


def _view_chain(node: Node) -> Iterator[Node]:
    """Returns the node, and the nodes of which it is a view."""
    yield node
    while node.op == "call_function" and node.all_input_nodes:
        target = node.target
        if target is not operator.getitem and not (
            isinstance(target, torch._ops.OpOverload) and any(made.alias_info for made in target._schema.returns)
        ):
            return
        node = node.all_input_nodes[0]
        yield node


def fix_graph_for_inductor(graph: GraphModule) -> None:
    """Rewrites a captured step for the compiler; what it computes stays the same."""
    _expand_scaled_sums(graph)
    _drop_empty_operands(graph)
    _draw_in_memory_order(graph)
    _skip_permutation_checks(graph)
    graph.recompile()


def _expand_scaled_sums(graph: GraphModule) -> None:
    """Turns `a + factor * b`, where that is one operation, into two.

    Inductor makes `addmm` of an addition to a matrix product and forgets the factor (torch 2.13): the update of plain
    SGD, `parameter + (-rate) * (x @ y)`, would go uphill with a rate of 1.
    """
    aten = torch.ops.aten
    kinds = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)
    for node in graph.graph.nodes:
        if node.target in kinds and "alpha" in node.kwargs:
            with graph.graph.inserting_before(node):
                scaled = graph.graph.call_function(aten.mul.Tensor, (node.args[1], node.kwargs["alpha"]))
            node.args, node.kwargs = (node.args[0], scaled), {}


def _drop_empty_operands(graph: GraphModule) -> None:
    """Puts tensors together without those of shape (0,), such as a cache that is empty yet.

    A compiler leaves them out by itself, but then hands on the strides of a single other tensor (torch 2.13), where the
    eager kernel writes it anew in order: views that were captured of that wouldn't fit.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        given: Any = node.args[0]
        there = [one for one in given if not _is_empty(one.meta["val"])]
        other = any(one.meta["val"].dtype != node.meta["val"].dtype for one in there)
        if other or len(there) in (0, len(given)):  # what is left out has a say in the result's dtype
            continue
        node.args = (there, *node.args[1:])
        if len(there) == 1:
            written: dict[str, Any] = {"memory_format": suggest_memory_format(node.meta["val"])}
            with graph.graph.inserting_before(node):
                alone = graph.graph.call_function(aten.clone.default, (there[0],), written)
            alone.meta = dict(node.meta)
            node.replace_all_uses_with(alone)
            graph.graph.erase_node(node)


def _is_empty(value: Tensor) -> bool:
    """Whether its shape is (0,), whatever is in the batch."""
    return value.ndim == 1 and isinstance(value.shape[0], int) and not value.shape[0]


def _draw_in_memory_order(graph: GraphModule) -> None:
    """Permutes what is drawn into, and what it is drawn from, so that dimensions are in the order of its memory.

    Eager kernels draw in the order of memory. A compiler chooses strides of its own for what is not its input, and so
    would give a mask with permuted strides, such as that of attention's output, other numbers.
    """
    permute = torch.ops.aten.permute.default
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if not _is_random(node) or not isinstance(value, Tensor) or value.is_contiguous():
            continue
        if node.target.overloadpacket is torch.ops.aten.normal:
            _draw_from_contiguous(graph, node, value)
            continue
        strides = value.stride()
        order = sorted(range(value.ndim), key=strides.__getitem__, reverse=True)
        with graph.graph.inserting_before(node):
            given = tuple(_permute_operand(graph, one, value, order) if _is_tensor(one) else one for one in node.args)
        with graph.graph.inserting_after(node):
            back = graph.graph.call_function(permute, (node, [order.index(place) for place in range(value.ndim)]))
        node.args, back.meta = given, dict(node.meta)
        node.meta["val"] = value.permute(order)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def _draw_from_contiguous(graph: GraphModule, node: Node, value: Tensor) -> None:
    """`normal` of tensors draws in the order of dimensions, wherever its operands lie, though the trace takes it to lie as they do."""
    with graph.graph.inserting_before(node):
        given = [_make_contiguous(graph, one) if _is_tensor(one) else one for one in node.args]
    node.args, node.meta["val"] = tuple(given), value.contiguous()


def _make_contiguous(graph: GraphModule, node: Node) -> Node:
    copied = graph.graph.call_function(
        torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
    )
    copied.meta["val"] = node.meta["val"].contiguous()
    return copied


def _permute_operand(graph: GraphModule, node: Node, value: Tensor, order: list[int]) -> Node:
    """An operand of what is drawn in the shape of `value`, with its dimensions in that order."""
    if node.meta["val"].shape != value.shape:
        there = node.meta["val"].expand(value.shape)
        node = graph.graph.call_function(torch.ops.aten.expand.default, (node, list(value.shape)))
        node.meta["val"] = there
    turned = graph.graph.call_function(torch.ops.aten.permute.default, (node, order))
    turned.meta["val"] = node.meta["val"].permute(order)
    return turned


def _is_tensor(given: Any) -> TypeGuard[Node]:
    return isinstance(given, Node) and isinstance(given.meta.get("val"), Tensor)


def _is_random(node: Node) -> bool:
    """Whether it draws the elements of one tensor from those of another, or into it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    return schema.name.partition("::")[2].removesuffix("_") in _RANDOM_OPS or schema.name.endswith("_like")


_RANDOM_OPS = ("bernoulli", "uniform", "normal", "exponential", "random", "cauchy", "geometric", "log_normal")


def _skip_permutation_checks(graph: GraphModule) -> None:
    """Rows in a drawn order, as mixup mixes them, are looked up without asking whether there are such rows.

    So the compiler has it itself, by a pattern that it fails with where all rows are looked up (torch 2.13).
    """
    aten = torch.ops.aten
    found = graph.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    written = mutated_nodes(list(graph.graph.nodes)) if found else set()
    for node in found:
        image, rows = node.args[0].meta["val"], node.args[1]
        if len(rows) == 1 and rows[0] not in written and _is_permutation(rows[0], image.shape[0]):
            node.target = aten._unsafe_index.Tensor


def _is_permutation(node: Node, rows: Any) -> bool:
    """Whether it draws an order of so many rows at the most, as far as that is known before a batch is there."""
    draws = node.target in (torch.ops.aten.randperm.default, torch.ops.aten.randperm.generator)
    return draws and isinstance(rows, int) and isinstance(node.args[0], int) and node.args[0] <= rows
