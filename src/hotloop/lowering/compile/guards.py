"""Checks of the tensors that a captured step contains as constants, and of inputs that share memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.core.state import bytes_of
from hotloop.core.task_parts.models import share_memory
from hotloop.core.torch_private import FakeTensor, OpOverload
from hotloop.lowering.object_state.side_effects import capture_error


def graph_constants(graph: GraphModule) -> dict[str, Any]:
    """Returns the constants of a graph by name: tensors, and possibly a generator of the user's."""
    return {str(node.target): getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")}


def constant_contents(graph: GraphModule) -> list[tuple[Any, ...]]:
    """Returns shape, dtype, strides and a hash of the bits of each constant."""
    return [
        (value.shape, value.dtype, value.stride(), hashlib.sha256(bytes_of(value).numpy().data).hexdigest())
        for value in graph_constants(graph).values()
    ]


def check_constants(graph: GraphModule, inputs: Iterable[Any]) -> None:
    """Refuses constants that training changes.

    Args:
        inputs: tensors that are inputs of the step.

    Raises:
        PlanError: a constant shares an input's memory, and so would not train, or the step writes to it.
    """
    addresses = {address for value in inputs if (address := _memory_address(value)) is not None}
    mutated = _mutated_names(graph, "get_attr")
    for name, value in graph_constants(graph).items():
        if not isinstance(value, Tensor):
            continue
        what = f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, FakeTensor):
            raise capture_error(
                f"the step stores {what} for the next step outside of the model's buffers", "a buffer for it"
            )
        if _memory_address(value) in addresses:
            raise capture_error(
                f"the step reads a parameter or buffer, {what}, by another way than its name in the model, so "
                "the compiled step would use its first value",
                "parameters and buffers that are read as attributes of their modules, or from an nn.ParameterList",
            )
        if name in mutated:
            raise capture_error(f"the step writes to {what} outside of the model", "a buffer of the model for it")


def check_batch(graph: GraphModule, batch: Sequence[Tensor]) -> None:
    """Refuses a step that writes to memory that several tensors of the batch share: each is an input of its own.

    Args:
        batch: the batch's tensors, which are the last inputs of the graph.

    Raises:
        PlanError: the step writes to shared memory.
    """
    inputs, mutated = graph.graph.find_nodes(op="placeholder"), _mutated_names(graph, "placeholder")
    addresses = Counter(map(_memory_address, batch))
    for node, value in zip(reversed(inputs), reversed(batch), strict=False):
        if str(node.target) in mutated and addresses[_memory_address(value)] > 1:
            raise capture_error(
                f"the step writes to a tensor of the batch, of shape {tuple(value.shape)}, which shares memory "
                "with another tensor",
                "a step that doesn't change its batch",
            )


def check_overlaps(graph: GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """Refuses a step that writes to memory that several tensors of the model share: each is an input of its own.

    Args:
        tensors: the first inputs of the graph, by place.

    Raises:
        PlanError: the step writes to shared memory.
    """
    inputs, mutated = graph.graph.find_nodes(op="placeholder"), _mutated_names(graph, "placeholder")
    model = {place: value for place, value in tensors.items() if place.startswith(("/parameters/", "/buffers/"))}
    addresses = Counter(map(_memory_address, model.values()))
    for node, (place, value) in zip(inputs, tensors.items(), strict=False):
        if place not in model or str(node.target) not in mutated or addresses[_memory_address(value)] == 1:
            continue
        for other_place, other in model.items():
            if other_place != place and _memory_address(other) == _memory_address(value) and share_memory(value, other):
                name, other_name = (path.split("/", 2)[2] for path in (place, other_place))
                raise capture_error(
                    f"the step writes to {name!r} of the model, which shares memory with {other_name!r}",
                    "parameters and buffers with memory of their own",
                    fix="compute one from the other in the forward pass, or choose compile=none and graphs=none",
                )


def have_same_constants(one: GraphModule, other: GraphModule) -> bool:
    """Whether the constants of two graphs of the same code are equal, bit by bit."""
    first, second = graph_constants(one), graph_constants(other)
    return first.keys() == second.keys() and all(_is_same(first[name], second[name]) for name in first)


def _is_same(one: Any, other: Any) -> bool:
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    same_layout = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return same_layout and bytes_of(one).equal(bytes_of(other))


def _memory_address(value: Any) -> int | None:
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage()._cdata if strided else None


def _mutated_names(graph: GraphModule, kind: str) -> set[str]:
    """Returns names of constants (`get_attr`) or inputs (`placeholder`) that an operation changes, also in a view."""
    sources: dict[Node, str] = {}
    mutated: set[str] = set()
    for node in graph.graph.nodes:
        if node.op == kind:
            sources[node] = str(node.target)
            continue
        for operand, writes in _shared_memory(node):
            if operand in sources:
                sources[node] = sources[operand]
                mutated |= {sources[operand]} if writes else set()
    return mutated


def _shared_memory(node: Node) -> list[tuple[Node, bool]]:
    """Returns the arguments that an operation returns as views or may change, and whether it writes to each."""
    if not isinstance(node.target, OpOverload):
        return [(operand, False) for operand in node.all_input_nodes]  # an item of several results
    shared = []
    for place, argument in enumerate(node.target._schema.arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None:
            leaves = pytree.tree_leaves(value)
            shared += [(leaf, argument.alias_info.is_write) for leaf in leaves if isinstance(leaf, Node)]
    return shared
