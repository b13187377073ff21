"""Moves a ReLU behind its max pooling: on a quarter of the numbers for windows of 2 by 2.

Both are monotone, so `max(relu(x)) = relu(max(x))`, bit by bit. The gradients are equal, too: a positive largest number
is the first of the largest in either order, and otherwise the ReLU's gradient is zero.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.lowering.rewrites.fx_nodes import (
    aten,
    find_calls,
    insert_operations,
    operand_at,
    replace_node,
    result_part,
)


def relu_after_pooling(graph: GraphModule) -> int:
    """Rewrites each ReLU whose result is only pooled; returns how often."""
    return sum(swap_relu_and_pool(graph, pool) for pool in find_calls(graph, aten.max_pool2d_with_indices.default))


def swap_relu_and_pool(graph: GraphModule, pool: Node) -> bool:
    """Moves the ReLU before a pooling behind it; returns whether that was possible."""
    relu, pooled = operand_at(pool), result_part(pool, 0)
    gated = gradient_gate(relu)
    if relu.target is not aten.relu.default or gated is None or pooled is None:
        return False
    spread = operand_at(gated)
    if not is_gradient(spread, pool) or set(relu.users) != {pool, spread, gated} or set(spread.users) != {gated}:
        return False
    for user in (pool, spread):
        user.replace_input_with(relu, operand_at(relu))
    with graph.graph.inserting_after(pooled):
        after = graph.graph.call_function(aten.relu.default, (pooled,))
    after.meta["val"] = pooled.meta["val"]
    pooled.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    gradient = operand_at(spread)
    spread.replace_input_with(gradient, insert_operations(graph, spread, _gate_gradient, gradient, after))
    replace_node(graph, gated, spread)
    graph.graph.erase_node(relu)
    return True


def gradient_gate(relu: Node) -> Node | None:
    """Returns the node of the ReLU's gradient; None if there is none."""
    gates = (user for user in relu.users if user.target is aten.threshold_backward.default and operand_at(user, 2) == 0)
    return next(gates, None)


def is_gradient(node: Node, pool: Node) -> bool:
    """Whether `node` is the gradient of the pooling."""
    backward = node.target is aten.max_pool2d_with_indices_backward.default
    return backward and operand_at(node, 1) is operand_at(pool) and operand_at(node, -1) is result_part(pool, 1)


def _gate_gradient(gradient: Tensor, output: Tensor) -> Tensor:
    return aten.threshold_backward.default(gradient, output, 0)
