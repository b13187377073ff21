"""Counts of a step's products by number format, observed operator by operator or read from a captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from hotloop.core.float32_switches import read_switches
from hotloop.core.number_formats import FORMATS, Float32Switches, operator_class, product_format
from hotloop.core.torch_private import ReadOnlyDispatchMode, tree_leaves

ProductCounts = Counter[tuple[str, str]]
"""The number of products by class of operators and format."""


class ProductCounter(ReadOnlyDispatchMode):
    """Counts the products of an eager step, each with the switches at its call."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: ProductCounts = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _count_product(self.counts, function, (args, kwargs), read_switches)
        return function(*args, **kwargs)


def count_products(graph: GraphModule, switches: Float32Switches) -> ProductCounts:
    """Returns the products of a captured step under the given switches, including graphs nested in its operators."""
    counts: ProductCounts = Counter()
    for inner in graph.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if node.op == "call_function":
                operands = [operand.meta.get("val") for operand in node.all_input_nodes]
                _count_product(counts, node.target, operands, lambda: switches)
    return counts


def _count_product(counts: ProductCounts, function: Any, operands: Any, switches: Any) -> None:
    operator = operator_class(getattr(getattr(function, "overloadpacket", function), "__name__", ""))
    if operator is None:
        return
    values = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]
    if format_ := _lowest_format(operator, values, switches()):
        counts[operator, format_] += 1


def _lowest_format(operator: str, values: Iterable[Tensor], switches: Float32Switches) -> str | None:
    """Returns the format with the fewest bits among the operands; None if no operand is a floating-point tensor."""
    named = [(str(value.dtype).removeprefix("torch."), value.device.type) for value in values]
    formats = [product_format(operator, dtype, device, switches) for dtype, device in named]
    return max(filter(None, formats), key=FORMATS.index, default=None)
