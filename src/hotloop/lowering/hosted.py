"""Computes on the host what a captured step computes with numbers, and gives the compiled step the results.

An optimizer asks for its count of steps and works out numbers for the update, such as Adam's corrections of the bias,
`1 - beta ** step` (Kingma and Ba: Adam, ICLR 2015, algorithm 1). In eager mode Python does that, once for each
parameter. A compiler that gets it with the rest puts the powers into the loop over the parameter's elements: on a CPU a
small network's step then takes three times as long. So they stay in Python, as in eager mode, and the compiled step
reads them out of one small tensor.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from hotloop.errors import PlanError
from hotloop.lowering.capture import Captured
from hotloop.lowering.lifted import Lifting, Number

aten = torch.ops.aten

_IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: operator.add,
    aten.sub_.Tensor: operator.sub,
    aten.mul_.Tensor: operator.mul,
    aten.div_.Tensor: operator.truediv,
}
"""What may be done to a number that the optimizer keeps as a tensor of shape (), before it is asked for."""


class Numbers:
    """What the host computes before each step.

    Args:
        reads: places, among the tensors of the step, of those that are read: shape (), on the CPU.
        compute: from their values to the numbers that the step takes.
        count: how many those are.
    """

    def __init__(self, reads: Sequence[int], compute: Callable[..., tuple[float, ...]], count: int) -> None:
        self._reads, self._compute = reads, compute
        self._cells = torch.zeros(count, dtype=torch.float64)
        self._memory = self._cells.numpy()

    def __call__(self, flat: Sequence[Tensor]) -> Tensor:
        """The numbers as a float64 tensor, shape (numbers,); the same tensor each time."""
        self._memory[:] = self._compute(*[flat[place].item() for place in self._reads])
        return self._cells


def host(captured: Captured) -> tuple[Captured, Numbers | None]:
    """The same step with one input more, the last, for the numbers that the host computes; None if there are none."""
    walk = _Walk(captured.graph)
    if not walk.slots:
        return captured, None
    try:
        hosted = _fed(captured, walk)
    except PlanError:  # it does something with a number that has no form for tensors: it stays as it was captured
        return captured, None
    return hosted, Numbers(walk.reads, walk.compute(), len(walk.slots))


class _Walk:
    """Goes through a captured graph from operation to operation, and finds what is arithmetic of numbers alone.

    Attributes:
        reads: places of the inputs that are read.
        slots: nodes whose numbers operations on tensors take, each with its place among the host's results.
        numbers: all nodes that are numbers known to the host, each with what the host computes there.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.reads: list[int] = []
        self.slots: dict[Node, int] = {}
        self.numbers: dict[Node, Node] = {}
        self._host = Graph()
        self._kept: dict[Node, Node | None] = {}  # tensors of shape () whose value follows from inputs; None: not read
        self._inputs = graph.graph.find_nodes(op="placeholder")
        for node in graph.graph.nodes:
            self._take(node)

    def compute(self) -> Callable[..., tuple[float, ...]]:
        self._host.output(tuple(self.numbers[node] for node in self.slots))
        return GraphModule({}, self._host).forward

    def _take(self, node: Node) -> None:
        if node.op == "placeholder":
            if _is_number(node):
                self._kept[node] = None
        elif node.op == "call_function":
            if node.target is aten._local_scalar_dense.default and node.args[0] in self._kept:
                self.numbers[node] = self._value(node.args[0])
            elif node.target in _IN_PLACE and self._changes_number(node):
                self._change(node)
            elif not isinstance(node.target, OpOverload) and self._follows(node):
                self.numbers[node] = self._host.node_copy(node, self.numbers.__getitem__)
            else:
                self._use(node)

    def _follows(self, node: Node) -> bool:
        given = node.all_input_nodes
        return bool(given) and all(one in self.numbers for one in given)

    def _changes_number(self, node: Node) -> bool:
        """Whether a known number becomes another known number."""
        kept, *others = node.args
        known = all(isinstance(other, int | float) or other in self.numbers for other in others)
        return kept in self._kept and known and not node.kwargs

    def _change(self, node: Node) -> None:
        """A number that is kept as a tensor changes; it is rounded as that is."""
        kept: Any = node.args[0]
        other = self.numbers.get(node.args[1], node.args[1])  # type: ignore[arg-type]
        if isinstance(node.args[1], Node):
            self._hand_over(node.args[1])
        value = self._host.call_function(_IN_PLACE[node.target], (self._value(kept), other))
        if node.meta["val"].dtype == torch.float32:
            value = self._host.call_function(_rounded, (value,))
        del self._kept[kept]
        self._kept[node] = value

    def _value(self, kept: Any) -> Node:
        value = self._kept[kept]
        if value is None:
            first = next(iter(self._host.nodes), None)
            with self._host.inserting_before(first):
                value = self._kept[kept] = self._host.placeholder(kept.name)
            self.reads.insert(0, self._inputs.index(kept))
        return value

    def _use(self, node: Node) -> None:
        """An operation on tensors takes numbers; what it might change is not known any more."""
        for given in node.all_input_nodes:
            self._kept.pop(given, None)
            if given in self.numbers:
                self._hand_over(given)

    def _hand_over(self, number: Node) -> None:
        self.slots.setdefault(number, len(self.slots))


def _is_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    wide = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    return wide and not value.ndim and value.device.type == "cpu"


def _rounded(value: float) -> float:
    return ctypes.c_float(value).value


def _fed(captured: Captured, walk: _Walk) -> Captured:
    with captured.examples[0].fake_mode:  # type: ignore[attr-defined]
        cells = torch.zeros(len(walk.slots), dtype=torch.float64)
    graph = captured.traced_again(lambda *flat: _Feeding(captured.graph, walk, flat[-1]).run(*flat[:-1]), cells)
    return replace(captured, graph=graph, examples=[*captured.examples, cells])


class _Feeding(Lifting):
    """Runs a captured graph with the host's numbers out of a tensor."""

    def __init__(self, graph: GraphModule, walk: _Walk, cells: Tensor) -> None:
        super().__init__(graph)
        self._walk, self._cells = walk, cells

    def run_node(self, n: Node) -> Any:
        if n in self._walk.slots:
            return Number(self._cells[self._walk.slots[n]])
        return None if n in self._walk.numbers else super().run_node(n)
