"""Counts of a step's products by number format, observed operator by operator or read from a captured graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from hotloop.core.dispatch_mode import Onlooker
from hotloop.core.float32_switches import read
from hotloop.core.number_formats import FORMATS, Switches, format_of, operator_of

Counts = Counter[tuple[str, str]]
"""The number of products by class of operators and format."""


class Products(Onlooker):
    """Counts the products of an eager step, each with the switches at its call."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _count(self.counts, function, (args, kwargs), read)
        return function(*args, **kwargs)


def products_of(graph: GraphModule, switches: Switches) -> Counts:
    """Returns the products of a captured step under the given switches, including graphs nested in its operators."""
    counts: Counts = Counter()
    for inner in graph.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if node.op == "call_function":
                _count(counts, node.target, [one.meta.get("val") for one in node.all_input_nodes], lambda: switches)
    return counts


def _count(counts: Counts, function: Any, given: Any, switches: Any) -> None:
    operator = operator_of(getattr(getattr(function, "overloadpacket", function), "__name__", ""))
    if operator is None:
        return
    values = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
    if format_ := _lowest(operator, values, switches()):
        counts[operator, format_] += 1


def _lowest(operator: str, values: Iterable[Tensor], switches: Switches) -> str | None:
    """Returns the format with the fewest bits among the operands; None if no operand is a floating-point tensor."""
    formats = [format_of(operator, _name(value.dtype), value.device.type, switches) for value in values]
    return max(filter(None, formats), key=FORMATS.index, default=None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
