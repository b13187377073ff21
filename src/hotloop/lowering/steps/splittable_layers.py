"""Finds the linear layers of a model that can be split over ranks, by tracing its forward with torch.fx.

A layer split by columns, and a later one split by rows, need one sum over the ranks, after the rows, if the operations
between act on each column (or head) by itself (Shoeybi et al.: Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from hotloop.errors import describe_error

_POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish),
    *(nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout),
)
_FUNCTIONS = {
    *(F.relu, F.relu6, F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, F.hardtanh, F.hardswish, F.hardsigmoid, F.softplus),
    *(F.tanh, F.sigmoid, F.logsigmoid, F.dropout, F.softmax, F.scaled_dot_product_attention),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.softmax, torch.square, torch.exp, torch.clamp, torch.dropout),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.matmul, torch.transpose, torch.permute),
    *(torch.reshape, torch.flatten),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg, operator.matmul),
}
_METHODS = {
    *("relu", "tanh", "sigmoid", "softmax", "square", "exp", "clamp", "pow", "add", "sub", "mul", "div", "neg"),
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "float", "to", "type_as"),
    *("masked_fill", "matmul"),
}
_SIZE_ATTRIBUTES = ("size", "dim", "shape", "dtype", "device", "ndim")
"""Attributes of any value that are equal for a split and a whole value."""


@dataclass(frozen=True)
class SplitGroup:
    """Names of linear layers that are split together.

    Attributes:
        columns: layers whose outputs are split over the ranks.
        rows: the layer whose inputs are split.
    """

    columns: tuple[str, ...]
    rows: str


@dataclass
class SplittableLayers:
    """Groups of layers to split, and why other linear layers stay whole on each rank, by name."""

    groups: list[SplitGroup] = field(default_factory=list)
    unsplit_reasons: dict[str, str] = field(default_factory=dict)


def find_splittable(model: nn.Module, ranks: int) -> SplittableLayers:
    """Traces the forward of a model, or of its submodules if it can't be traced; fx may set attributes on them."""
    found = SplittableLayers()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found.unsplit_reasons[name] = "its projections are one packed weight"
    for path, graph in _traced_graphs(model, "", found):
        _GroupWalk(model, path, graph, ranks, found).take()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_within_group(name, found):
            reason = "no other linear layer follows it with pointwise operations alone between"
            found.unsplit_reasons.setdefault(name, reason)
    return found


def _is_within_group(name: str, found: SplittableLayers) -> bool:
    """Whether a layer is split, or has a reason, or is part of a module that has one."""
    split = {layer for group in found.groups for layer in (*group.columns, group.rows)}
    return any(name == known or name.startswith(f"{known}.") for known in split | found.unsplit_reasons.keys())


def _traced_graphs(module: nn.Module, path: str, found: SplittableLayers) -> Iterator[tuple[str, fx.Graph]]:
    """Yields names and graphs of the largest submodules whose forward can be traced."""
    if not any(isinstance(part, nn.Linear) for part in module.modules()) or path in found.unsplit_reasons:
        return
    try:
        yield path, _Tracer().trace(module)
    except Exception as error:  # a user's forward may raise anything when given a Proxy
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            if isinstance(child, nn.Linear):
                found.unsplit_reasons[inside] = f"the forward that calls it can't be followed ({describe_error(error)})"
            yield from _traced_graphs(child, inside, found)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # allows slicing a buffer, such as a mask, to a traced size


class _GroupWalk:
    """Finds groups in one graph, from each linear layer back to the layers before it."""

    def __init__(self, model: nn.Module, path: str, graph: fx.Graph, ranks: int, found: SplittableLayers) -> None:
        self.model, self.path, self.graph, self.ranks, self.found = model, path, graph, ranks, found
        self._calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
        self._holders = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
        self._taken: set[fx.Node] = set()

    def take(self) -> None:
        for node in self.graph.nodes:
            if self._module(node, nn.Linear) is not None and node not in self._taken:
                self._try(node)

    def _try(self, rows: fx.Node) -> None:
        """Records the group that ends in this layer, or why it can't be split."""
        between: set[fx.Node] = set()
        columns: list[fx.Node] = []
        if not self._feeding_layer(rows.all_input_nodes[0], between, columns) or not columns:
            return
        columns = [node for node in self.graph.nodes if node in columns]  # in the order of the forward
        if why := self._hindrance([*columns, rows], between, rows):
            self.found.unsplit_reasons |= {self._name(node): why for node in (*columns, rows)}
            return
        self._taken |= {*columns, rows}
        self.found.groups.append(SplitGroup(tuple(self._name(node) for node in columns), self._name(rows)))

    def _feeding_layer(self, value: Any, between: set[fx.Node], columns: list[fx.Node]) -> bool:
        """Collects the nodes before a value up to the next linear layers; False if another operation comes first."""
        if not isinstance(value, fx.Node) or value in between or value in columns:
            return True
        if value in self._taken:
            return False
        if self._module(value, nn.Linear) is not None:
            columns.append(value)
            return True
        known: Any = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(value.op, ())
        if self._module(value, _POINTWISE) is None and value.target not in known:
            return False
        between.add(value)
        operands = [operand for operand in value.all_input_nodes if not self._is_fixed(operand)]
        return all(self._feeding_layer(operand, between, columns) for operand in operands)

    def _hindrance(self, layers: list[fx.Node], between: set[fx.Node], rows: fx.Node) -> str:
        """Returns why these layers can't be split together; empty if they can."""
        modules = [self._module(node, nn.Linear) for node in layers]
        for node, module in zip(layers, modules, strict=True):
            assert module is not None
            if type(module) is not nn.Linear:
                return f"{self._name(node)!r} is a {type(module).__name__}, and no plain Linear"
            if self._calls[str(node.target)] > 1:
                return f"{self._name(node)!r} is called more than once"
            if any(self._holders[id(value)] > 1 for value in module.parameters()):
                return f"{self._name(node)!r} shares its weight with another module"
        for node in (*between, *layers[:-1]):
            for user in node.users:
                if user not in between and user is not rows and not self._is_fixed(user):
                    return f"what {self._name(layers[0])!r} gives is used by {user.name!r}, too"
        width = modules[-1].in_features if modules[-1] is not None else 0
        uneven = [layer.out_features for layer in modules[:-1] if layer is not None and layer.out_features != width]
        if uneven or width % self.ranks:
            return f"{(uneven or [width])[0]} columns can't be divided evenly among {self.ranks} ranks"
        return ""

    def _is_fixed(self, node: fx.Node) -> bool:
        """Whether the node depends on sizes, numbers and buffers alone, and so needs no gradient."""
        if node.op == "get_attr":
            return str(node.target) not in dict(self._part.named_parameters(remove_duplicate=False))
        if node.op == "call_method" and node.target in _SIZE_ATTRIBUTES:
            return True
        if node.op == "call_function" and node.target is getattr:
            return node.args[1] in _SIZE_ATTRIBUTES
        operands = node.all_input_nodes
        return node.op in ("call_function", "call_method") and bool(operands) and all(map(self._is_fixed, operands))

    @property
    def _part(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    def _module(self, node: fx.Node, kinds: Any) -> Any:
        """Returns the module that a node calls, if it has one of the kinds."""
        module = self._part.get_submodule(str(node.target)) if node.op == "call_module" else None
        return module if isinstance(module, kinds) else None

    def _name(self, node: fx.Node) -> str:
        return f"{self.path}.{node.target}" if self.path else str(node.target)
