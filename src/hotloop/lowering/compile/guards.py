"""Tensors that a captured step holds as constants, since they are none of its inputs: what they may be, and what not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from hotloop.core.state import bytes_of
from hotloop.core.task_parts.memory_layout import share_memory
from hotloop.lowering.object_state.side_effects import capture_error


def graph_constants(graph: GraphModule) -> dict[str, Any]:
    """The constants of a graph by name; beside tensors there may be a generator of the user's own."""
    return {str(node.target): getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")}


def constant_contents(graph: GraphModule) -> list[tuple[Any, ...]]:
    """What tells the constants of a graph from others: shapes, dtypes, strides and a hash of the bits."""
    return [
        (value.shape, value.dtype, value.stride(), hashlib.sha256(bytes_of(value).numpy().data).hexdigest())
        for value in graph_constants(graph).values()
    ]


def check_constants(graph: GraphModule, inputs: Iterable[Any]) -> None:
    """Refuses constants that training changes.

    Args:
        inputs: tensors whose memory the step reads as its inputs.

    Raises:
        PlanError: a constant is memory of an input, which would not train, or the step writes to it.
    """
    own = {memory for value in inputs if (memory := _memory_address(value)) is not None}
    written = _mutated_names(graph, "get_attr")
    for name, value in graph_constants(graph).items():
        if not isinstance(value, Tensor):
            continue
        what = f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, FakeTensor):
            raise capture_error(
                f"it keeps {what} from one step for the next outside of the model's buffers", "a buffer for it"
            )
        if _memory_address(value) in own:
            raise capture_error(
                f"it reaches a parameter or buffer, {what}, by another way than its name in the model, so that it would "
                "stay as it is",
                "parameters and buffers that are read as attributes of their modules, or from an nn.ParameterList",
            )
        if name in written:
            raise capture_error(f"it writes to {what} that is none of the model's", "a buffer of the model for it")


def check_batch(graph: GraphModule, batch: Sequence[Tensor]) -> None:
    """Refuses a step that writes to memory of several tensors of the batch, each of which is an input of its own.

    Args:
        batch: its tensors, which are the last inputs of the graph.

    Raises:
        PlanError: it does.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    written = _mutated_names(graph, "placeholder")
    places = Counter(_memory_address(value) for value in batch)
    for node, value in zip(reversed(inputs), reversed(batch), strict=False):
        if str(node.target) in written and places[_memory_address(value)] > 1:
            raise capture_error(
                f"it writes to a tensor of the batch, of shape {tuple(value.shape)}, whose memory another one has too",
                "a step that leaves its batch as it is",
            )


def check_overlaps(graph: GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """Refuses a step that writes to a tensor of the model whose memory another one has too, each being an input of its own.

    Args:
        tensors: the first inputs of the graph, by place.

    Raises:
        PlanError: it does.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    written = _mutated_names(graph, "placeholder")
    model = {place: value for place, value in tensors.items() if place.startswith(("/parameters/", "/buffers/"))}
    memories = Counter(map(_memory_address, model.values()))
    for node, (place, value) in zip(inputs, tensors.items(), strict=False):
        if place not in model or str(node.target) not in written or memories[_memory_address(value)] == 1:
            continue
        for another, other in model.items():
            if another != place and _memory_address(other) == _memory_address(value) and share_memory(value, other):
                one, two = (name.split("/", 2)[2] for name in (place, another))
                raise capture_error(
                    f"it writes to {one!r} of the model, whose memory {two!r} has too",
                    "parameters and buffers with memory of their own",
                    fix="take one out of the other in the forward pass, or choose compile=none and graphs=none",
                )


def have_same_constants(one: GraphModule, other: GraphModule) -> bool:
    """Whether two graphs of the same code hold the same, bit by bit."""
    first, second = graph_constants(one), graph_constants(other)
    return first.keys() == second.keys() and all(_is_same(first[name], second[name]) for name in first)


def _is_same(one: Any, other: Any) -> bool:
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return alike and bytes_of(one).equal(bytes_of(other))


def _memory_address(value: Any) -> int | None:
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage()._cdata if strided else None


def _mutated_names(graph: GraphModule, kind: str) -> set[str]:
    """Names of constants (`get_attr`) or inputs (`placeholder`) that an operation changes, itself or in a view of it."""
    behind: dict[Node, str] = {}
    found: set[str] = set()
    for node in graph.graph.nodes:
        if node.op == kind:
            behind[node] = str(node.target)
            continue
        for given, writes in _shared_memory(node):
            if given in behind:
                behind[node] = behind[given]
                found |= {behind[given]} if writes else set()
    return found


def _shared_memory(node: Node) -> list[tuple[Node, bool]]:
    """What an operation returns the memory of, or writes to, and whether it does write."""
    if not isinstance(node.target, OpOverload):
        return [(one, False) for one in node.all_input_nodes]  # an item of several results
    found = []
    for place, argument in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None:
            leaves = pytree.tree_leaves(given)
            found += [(one, argument.alias_info.is_write) for one in leaves if isinstance(one, Node)]
    return found
