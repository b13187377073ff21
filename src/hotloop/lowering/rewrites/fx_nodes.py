"""What rewrites of a captured graph have in common: looking at its nodes, and putting others in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


def find_calls(graph: GraphModule, target: Any) -> list[Node]:
    """The calls of one operation, from first to last."""
    return graph.graph.find_nodes(op="call_function", target=target)


def operand_at(node: Node, place: int = 0) -> Any:
    """What an operation takes at a place: a node, where that is a tensor."""
    return node.args[place]


def fake_value(node: Any) -> FakeTensor:
    """The tensor without content that a node gives."""
    return node.meta["val"]


def at_least(limit: float, size: Any) -> bool:
    """Whether a size is known to be as large as that: one that depends on the batch is none that is known."""
    return isinstance(size, int) and size >= limit


def argument_named(node: Node, name: str) -> Any:
    """An argument of an operation by its name in the schema, its default where it isn't given."""
    target: Any = node.target
    for place, known in enumerate(target._schema.arguments):
        if known.name == name:
            given = node.args[place] if place < len(node.args) else None
            return node.kwargs.get(name, known.default_value) if given is None else given
    raise AssertionError(f"{node.target} has no {name}")


def as_pair(value: Sequence[int]) -> tuple[int, int]:
    """What torch takes as one number for both dimensions, or one for each."""
    return value[0], value[-1]


def is_plain(image: Tensor) -> bool:
    """Whether it is a batch of images of real numbers, in the usual order of dimensions."""
    return image.ndim == 4 and image.dtype in (torch.float32, torch.float64) and image.is_contiguous()


def result_part(node: Node, place: int) -> Node | None:
    """What takes one of several results of an operation; None if nothing does."""
    return next((user for user in node.users if operand_at(user, 1) == place), None)


def insert_operations(graph: GraphModule, before: Node, function: Callable[..., Any], *inputs: Node) -> Any:
    """Puts the operations of `function` on what `inputs` give before a node; returns the nodes of its results."""
    values = [fake_value(node) for node in inputs]
    with values[0].fake_mode, torch.no_grad():
        traced = make_fx(lambda *given: function(*given))(*values).graph
    places = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.graph.inserting_before(before):
        return graph.graph.graph_copy(traced, places)


def matrix_products(graph: GraphModule, *dtypes: torch.dtype) -> list[Node]:
    """The products of two matrices whose numbers have one of these dtypes, with no more than a bias added."""
    found = find_calls(graph, aten.mm.default) + find_calls(graph, aten.addmm.default)
    return [node for node in found if _is_plain_product(node, dtypes)]


def _is_plain_product(node: Node, dtypes: Sequence[torch.dtype]) -> bool:
    made, given = fake_value(node), [fake_value(one) for one in node.args if isinstance(one, Node)]
    if made.dtype not in dtypes or any(value.dtype != made.dtype for value in given):
        return False
    if node.target is aten.mm.default:
        return True
    return bool(
        given[0].shape == made.shape[1:] and argument_named(node, "beta") == 1 and argument_named(node, "alpha") == 1
    )


def replace_product(graph: GraphModule, node: Node, by: Callable[..., Tensor]) -> None:
    """Has a product be what `by` makes of both matrices, and of the bias behind them where there is one."""
    *added, one, other = node.args
    replace_node(graph, node, insert_operations(graph, node, by, one, other, *added))  # type: ignore[arg-type]  # all are nodes


def replace_node(graph: GraphModule, node: Node, by: Node) -> None:
    """Gives all users of a node another in its place, and takes it out."""
    node.replace_all_uses_with(by)
    graph.graph.erase_node(node)


def drop_node(graph: GraphModule, node: Node) -> None:
    """Takes out an operation whose results nothing uses any more."""
    for result in list(node.users):
        graph.graph.erase_node(result)
    graph.graph.erase_node(node)


def drop_identities(graph: GraphModule) -> None:
    """Takes out what stands between operations and does nothing: `detach`, and that a new value is changed in place."""
    for node in find_calls(graph, aten.detach.default):
        replace_node(graph, node, operand_at(node))
    for node in find_calls(graph, aten.relu_.default):
        given = operand_at(node)
        if given.op == "call_function" and _is_new(given) and list(given.users) == [node]:
            node.target = aten.relu.default
    graph.recompile()


def _is_new(node: Node) -> bool:
    """Whether an operation gives memory that nothing else has."""
    whole = operand_at(node) if node.target is operator.getitem else node
    schema = getattr(whole.target, "_schema", None)
    return schema is not None and not any(one.alias_info for one in schema.returns)


_CHANNELS_LAST = [3, 0, 2, 1]
"""Inductor's ranks of the strides of (samples, channels, rows, columns): the channels' is the smallest."""


def to_layout_of(given: Tensor, image: Tensor) -> Tensor:
    """The same values; both (samples, channels, rows, columns), of other rows and columns."""
    return _operator()(given, image)


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
    """Has Inductor know the operation, before it compiles a graph that may have some."""
    from torch._inductor.lowering import register_lowering

    register_lowering(_operator(), type_promotion_kind=None)(_lower_layout)


def _lower_layout(given: Any, image: Any) -> Any:
    from torch._inductor.ir import ExternKernel

    return ExternKernel.require_stride_order(given, _CHANNELS_LAST) if _has_channels_last(image) else given


def _has_channels_last(image: Any) -> bool:
    """Whether what an image is computed from, number by number, lies so."""
    from torch._inductor.ir import get_stride_order
    from torch._inductor.virtualized import V

    found = [V.graph.try_get_buffer(name) for name in image.get_read_names()]
    same = [one for one in found if one is not None and list(one.get_size()) == list(image.get_size())]
    return bool(same) and all(get_stride_order(one.get_stride()) == _CHANNELS_LAST for one in same)
