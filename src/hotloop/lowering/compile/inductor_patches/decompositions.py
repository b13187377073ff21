"""Rewrites patterns of a captured graph that Inductor compiles to another result than the eager step (torch 2.13).

Each rewrite names its upstream issue, if known. Tests without the rewrites: `test_inductor_drops_the_factor_of_a_sum`,
`test_inductor_keeps_the_strides_of_a_single_operand`, `test_inductor_draws_in_another_order`,
`test_that_takes_what_is_written_for_it`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node


def mutated_nodes(nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes that a later operation changes in place, directly or through a view."""
    found = set[Node]()
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for place, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
                value = node.args[place]
                if argument.is_write and isinstance(value, Node):
                    found.update(_view_chain(value))
    return found


def _view_chain(node: Node) -> Iterator[Node]:
    """Yields the node, and the nodes of which it is a view."""
    yield node
    while node.op == "call_function" and node.all_input_nodes:
        target = node.target
        if target is not operator.getitem and not (
            isinstance(target, torch._ops.OpOverload) and any(value.alias_info for value in target._schema.returns)
        ):
            return
        node = node.all_input_nodes[0]
        yield node


def fix_graph_for_inductor(graph: GraphModule) -> None:
    """Rewrites a captured step for Inductor; the results stay the same."""
    _expand_scaled_sums(graph)
    _drop_empty_operands(graph)
    _draw_in_memory_order(graph)
    _skip_permutation_checks(graph)
    graph.recompile()


def _expand_scaled_sums(graph: GraphModule) -> None:
    """Splits `a + factor * b`, as one operation, into two.

    Inductor turns an addition to a matrix product into `addmm`, and drops the factor: plain SGD's update, `parameter +
    (-rate) * (x @ y)`, would ascend with a rate of 1. Upstream: pytorch/pytorch#167313 for the reverse pattern.
    """
    aten = torch.ops.aten
    kinds = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)
    for node in graph.graph.nodes:
        if node.target in kinds and "alpha" in node.kwargs:
            with graph.graph.inserting_before(node):
                scaled = graph.graph.call_function(aten.mul.Tensor, (node.args[1], node.kwargs["alpha"]))
            node.args, node.kwargs = (node.args[0], scaled), {}


def _drop_empty_operands(graph: GraphModule) -> None:
    """Removes tensors of shape (0,), such as an empty cache, from concatenations.

    Inductor drops them by itself, but keeps the strides of a single remaining tensor. The eager kernel returns a new
    contiguous tensor, and captured views of that tensor don't fit the other strides.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        operands: Any = node.args[0]
        filled = [operand for operand in operands if not _is_empty(operand.meta["val"])]
        # an empty operand may have decided the result's dtype
        has_other_dtype = any(operand.meta["val"].dtype != node.meta["val"].dtype for operand in filled)
        if has_other_dtype or len(filled) in (0, len(operands)):
            continue
        node.args = (filled, *node.args[1:])
        if len(filled) == 1:
            options: dict[str, Any] = {"memory_format": suggest_memory_format(node.meta["val"])}
            with graph.graph.inserting_before(node):
                copied = graph.graph.call_function(aten.clone.default, (filled[0],), options)
            copied.meta = dict(node.meta)
            node.replace_all_uses_with(copied)
            graph.graph.erase_node(node)


def _is_empty(value: Tensor) -> bool:
    return value.ndim == 1 and isinstance(value.shape[0], int) and not value.shape[0]


def _draw_in_memory_order(graph: GraphModule) -> None:
    """Permutes the operands of random operations so that dimensions are in the order of memory.

    Eager kernels draw in the order of memory. Inductor chooses other strides for intermediate tensors, so a mask with
    permuted strides, such as of attention's output, would get other numbers.
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
            args = tuple(_permute_operand(graph, arg, value, order) if _is_tensor(arg) else arg for arg in node.args)
        with graph.graph.inserting_after(node):
            back = graph.graph.call_function(permute, (node, [order.index(place) for place in range(value.ndim)]))
        node.args, back.meta = args, dict(node.meta)
        node.meta["val"] = value.permute(order)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def _draw_from_contiguous(graph: GraphModule, node: Node, value: Tensor) -> None:
    """Makes the operands of `normal` contiguous: unlike its meta kernel, it draws in the order of dimensions."""
    with graph.graph.inserting_before(node):
        args = tuple(_make_contiguous(graph, arg) if _is_tensor(arg) else arg for arg in node.args)
    node.args, node.meta["val"] = args, value.contiguous()


def _make_contiguous(graph: GraphModule, node: Node) -> Node:
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    copied = graph.graph.call_function(torch.ops.aten.clone.default, (node,), options)
    copied.meta["val"] = node.meta["val"].contiguous()
    return copied


def _permute_operand(graph: GraphModule, node: Node, value: Tensor, order: list[int]) -> Node:
    """Returns an operand, expanded to the shape of `value`, with permuted dimensions."""
    if node.meta["val"].shape != value.shape:
        expanded = node.meta["val"].expand(value.shape)
        node = graph.graph.call_function(torch.ops.aten.expand.default, (node, list(value.shape)))
        node.meta["val"] = expanded
    permuted = graph.graph.call_function(torch.ops.aten.permute.default, (node, order))
    permuted.meta["val"] = node.meta["val"].permute(order)
    return permuted


def _is_tensor(value: Any) -> TypeGuard[Node]:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _is_random(node: Node) -> bool:
    """Whether the node draws into a tensor, or in the shape of a tensor."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    return schema.name.partition("::")[2].removesuffix("_") in _RANDOM_OPS or schema.name.endswith("_like")


_RANDOM_OPS = ("bernoulli", "uniform", "normal", "exponential", "random", "cauchy", "geometric", "log_normal")


def _skip_permutation_checks(graph: GraphModule) -> None:
    """Drops the bounds check of indexing with a random permutation of the rows, as mixup does.

    Inductor has the same pattern, but fails if all rows are indexed. Upstream: pytorch/pytorch#158457 and #183988.
    """
    aten = torch.ops.aten
    lookups = graph.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    mutated = mutated_nodes(list(graph.graph.nodes)) if lookups else set()
    for node in lookups:
        image, rows = node.args[0].meta["val"], node.args[1]
        if len(rows) == 1 and rows[0] not in mutated and _is_permutation(rows[0], image.shape[0]):
            node.target = aten._unsafe_index.Tensor


def _is_permutation(node: Node, rows: Any) -> bool:
    """Whether the node draws a permutation of at most `rows` rows, as far as shapes are known at capture."""
    draws = node.target in (torch.ops.aten.randperm.default, torch.ops.aten.randperm.generator)
    return draws and isinstance(rows, int) and isinstance(node.args[0], int) and node.args[0] <= rows
