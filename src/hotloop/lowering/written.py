"""Which results of a captured graph are changed in place after they were made."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node


def written_to(nodes: Sequence[Node]) -> set[Node]:
    """What is changed in place after it was made, by itself or through a view: what it holds can't be told from its node."""
    found = set[Node]()
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for place, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
                given = node.args[place]
                if argument.is_write and isinstance(given, Node):
                    found.update(_viewed(given))
    return found


def _viewed(node: Node) -> Iterator[Node]:
    """The node, and what it is a view of."""
    yield node
    while node.op == "call_function" and node.all_input_nodes:
        target = node.target
        if target is not operator.getitem and not (
            isinstance(target, torch._ops.OpOverload) and any(made.alias_info for made in target._schema.returns)
        ):
            return
        node = node.all_input_nodes[0]
        yield node
