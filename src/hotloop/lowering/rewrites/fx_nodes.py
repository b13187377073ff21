"""Common parts of rewrites: reads and replaces nodes of a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from hotloop.core.torch_private import FakeTensor

aten = torch.ops.aten


def find_calls(graph: GraphModule, target: Any) -> list[Node]:
    """Returns the calls of one operation, from first to last."""
    return graph.graph.find_nodes(op="call_function", target=target)


def operand_at(node: Node, place: int = 0) -> Any:
    return node.args[place]


def fake_value(node: Any) -> FakeTensor:
    return node.meta["val"]


def at_least(limit: float, size: Any) -> bool:
    """Whether a size is known, and at least `limit`; a size that depends on the batch isn't known."""
    return isinstance(size, int) and size >= limit


def argument_named(node: Node, name: str) -> Any:
    """Returns an argument of an operation by its name in the schema, or its default."""
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            value = node.args[place] if place < len(node.args) else None
            return node.kwargs.get(name, argument.default_value) if value is None else value
    raise AssertionError(f"{node.target} has no {name}")


def as_pair(value: Sequence[int]) -> tuple[int, int]:
    """Returns torch's one or two numbers for two dimensions as a pair."""
    return value[0], value[-1]


def is_plain(image: Tensor) -> bool:
    """Whether the tensor is a contiguous batch of images in fp32 or float64."""
    return image.ndim == 4 and image.dtype in (torch.float32, torch.float64) and image.is_contiguous()


def result_part(node: Node, place: int) -> Node | None:
    """Returns the node that takes one of several results of an operation; None if nothing does."""
    return next((user for user in node.users if operand_at(user, 1) == place), None)


_inserted = ContextVar[Mapping[Any, Callable[..., Any]]]("decompositions of inserted operations", default={})  # noqa: B039 - never changed in place


@contextmanager
def decompose_inserted(table: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Decomposes the operations that are inserted within the context, for a graph that was decomposed before."""
    token = _inserted.set(table)
    try:
        yield
    finally:
        _inserted.reset(token)


def insert_operations(graph: GraphModule, before: Node, function: Callable[..., Any], *inputs: Node) -> Any:
    """Inserts the operations of `function` on `inputs` before a node; returns the nodes of its results."""
    values = [fake_value(node) for node in inputs]
    with values[0].fake_mode, torch.no_grad():
        traced = make_fx(lambda *operands: function(*operands), dict(_inserted.get()))(*values).graph
    places = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.graph.inserting_before(before):
        return graph.graph.graph_copy(traced, places)


def matrix_products(graph: GraphModule, *dtypes: torch.dtype) -> list[Node]:
    """Returns the products of two matrices of these dtypes, with at most a bias added."""
    products = find_calls(graph, aten.mm.default) + find_calls(graph, aten.addmm.default)
    return [node for node in products if _is_plain_product(node, dtypes)]


def _is_plain_product(node: Node, dtypes: Sequence[torch.dtype]) -> bool:
    result, operands = fake_value(node), [fake_value(arg) for arg in node.args if isinstance(arg, Node)]
    if result.dtype not in dtypes or any(value.dtype != result.dtype for value in operands):
        return False
    if node.target is aten.mm.default:
        return True
    is_unscaled = argument_named(node, "beta") == 1 and argument_named(node, "alpha") == 1
    return bool(operands[0].shape == result.shape[1:] and is_unscaled)


def replace_product(graph: GraphModule, node: Node, by: Callable[..., Tensor]) -> None:
    """Replaces a product by the operations of `by` on both matrices, and on the bias if there is one."""
    *bias, left, right = node.args
    replace_node(graph, node, insert_operations(graph, node, by, left, right, *bias))  # type: ignore[arg-type]  # all are nodes


def replace_node(graph: GraphModule, node: Node, by: Node) -> None:
    """Replaces a node for all users, and erases it."""
    node.replace_all_uses_with(by)
    graph.graph.erase_node(node)


def drop_node(graph: GraphModule, node: Node) -> None:
    """Erases an operation whose results have no users."""
    for result in list(node.users):
        graph.graph.erase_node(result)
    graph.graph.erase_node(node)


def drop_identities(graph: GraphModule) -> None:
    """Removes `detach`, and turns in-place ReLU on a new value into an ordinary one."""
    for node in find_calls(graph, aten.detach.default):
        replace_node(graph, node, operand_at(node))
    for node in find_calls(graph, aten.relu_.default):
        operand = operand_at(node)
        if operand.op == "call_function" and _is_new(operand) and list(operand.users) == [node]:
            node.target = aten.relu.default
    graph.recompile()


def _is_new(node: Node) -> bool:
    """Whether an operation returns new memory."""
    whole = operand_at(node) if node.target is operator.getitem else node
    schema = getattr(whole.target, "_schema", None)
    return schema is not None and not any(value.alias_info for value in schema.returns)


_CHANNELS_LAST = [3, 0, 2, 1]
"""Inductor's order of strides for (samples, channels, rows, columns): channels have the smallest."""


def to_layout_of(value: Tensor, image: Tensor) -> Tensor:
    """Returns equal values in the image's layout; both are (samples, channels, rows, columns) of any sizes."""
    return _operator()(value, image)


@cache
def _operator() -> Any:
    @torch.library.custom_op("hotloop::laid_out", mutates_args=())
    def laid_out(given: Tensor, image: Tensor) -> Tensor:
        return given.clone()

    @laid_out.register_fake
    def _(given: Tensor, image: Tensor) -> Tensor:
        return torch.empty_like(given)

    return torch.ops.hotloop.laid_out.default


@cache
def register_layout_op() -> None:
    """Registers the operation with Inductor."""
    from torch._inductor.lowering import register_lowering

    register_lowering(_operator(), type_promotion_kind=None)(_lower_layout)


def _lower_layout(value: Any, image: Any) -> Any:
    from torch._inductor.ir import ExternKernel

    return ExternKernel.require_stride_order(value, _CHANNELS_LAST) if _has_channels_last(image) else value


def _has_channels_last(image: Any) -> bool:
    """Whether the tensors from which an image is computed elementwise are channels last."""
    from torch._inductor.ir import get_stride_order
    from torch._inductor.virtualized import V

    buffers = map(V.graph.try_get_buffer, image.get_read_names())
    sources = [one for one in buffers if one is not None and list(one.get_size()) == list(image.get_size())]
    return bool(sources) and all(get_stride_order(buffer.get_stride()) == _CHANNELS_LAST for buffer in sources)
