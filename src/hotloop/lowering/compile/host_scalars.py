"""Computes on the host what a captured step computes with numbers, and gives the compiled step the results.

An optimizer asks for its count of steps and works out numbers for the update, such as Adam's corrections of the bias,
`1 - beta ** step` (Kingma and Ba: Adam, ICLR 2015, algorithm 1). In eager mode Python does that, once for each
parameter; here once for all that have taken as many steps. A compiler that gets it with the rest puts the powers into the loop over the parameter's elements: on a CPU a
small network's step then takes three times as long. So they stay in Python, as in eager mode, and the compiled step
reads them out of one small tensor.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from hotloop.errors import PlanError
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.compile.device_scalars import DeviceScalar, ScalarLifter

aten = torch.ops.aten

_IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: operator.add,
    aten.sub_.Tensor: operator.sub,
    aten.mul_.Tensor: operator.mul,
    aten.div_.Tensor: operator.truediv,
}
"""What may be done to a number that the optimizer keeps as a tensor of shape (), before it is asked for."""


@dataclass(frozen=True)
class ScalarFormula:
    """How one kind of number, of which there may be one for each parameter, comes of what is read.

    Attributes:
        compute: from the values that it takes to `(number,)`.
        taken: for each number of the kind the places, among what is read, of the values that it takes.
    """

    compute: Callable[..., tuple[float, ...]]
    inputs: Sequence[tuple[int, ...]]

    def each(self, values: Sequence[float]) -> list[float]:
        """The numbers of the kind, from all that is read: computed once for all that take the same values."""
        given = [tuple([values[place] for place in places]) for places in self.inputs]
        known = {taken: self.compute(*taken)[0] for taken in set(given)}
        return [known[taken] for taken in given]


class HostScalars:
    """What the host computes before each step.

    Args:
        reads: places, among the tensors of the step, of those that are read: shape (), on the CPU.
        formulas: of the numbers that the step takes, in their order.
        first: from all that is read to the first number of each formula.
    """

    def __init__(
        self,
        reads: Sequence[int],
        formulas: Sequence[ScalarFormula],
        first: Callable[[Sequence[float]], tuple[float, ...]],
    ) -> None:
        counts = [len(formula.inputs) for formula in formulas]
        ends = itertools.accumulate(counts)
        self._formulas, self._first = formulas, first
        self._cells = torch.zeros(sum(counts), dtype=torch.float64)
        self._parts = [self._cells[end - count : end].numpy() for count, end in zip(counts, ends, strict=True)]
        peers = {frozenset(places) for formula in formulas for places in zip(*formula.inputs, strict=True)}
        # What all parameters have in the same place, such as their counts, which are equal as a rule.
        self._peers = [operator.itemgetter(*places) for places in peers if len(places) > 1]
        self._reads = reads
        self._bound: list[Tensor] = []
        self._readers: list[Callable[[], float]] = []

    def __call__(self, flat: Sequence[Tensor]) -> Tensor:
        """The numbers as a float64 tensor, shape (numbers,); the same tensor each time."""
        bound = [flat[place] for place in self._reads]
        if not self._bound or not all(map(operator.is_, bound, self._bound)):
            self._bind(bound)
        values = [read() for read in self._readers]
        for peers in self._peers:
            alike = peers(values)
            if alike.count(alike[0]) < len(alike):
                return self._each(values)
        for cells, number in zip(self._parts, self._first(values), strict=True):
            cells.fill(number)
        return self._cells

    def _each(self, values: Sequence[float]) -> Tensor:
        """The same where some parameters have taken more steps than others, or groups have settings of their own."""
        for cells, formula in zip(self._parts, self._formulas, strict=True):
            cells[:] = formula.each(values)
        return self._cells

    def _bind(self, tensors: list[Tensor]) -> None:
        """Finds out where to read: an array that shares a tensor's memory tells it faster than `Tensor.item`."""
        self._bound = tensors
        self._readers = [value.detach().numpy().item for value in tensors]


def split_host_scalars(captured: CapturedStep) -> tuple[CapturedStep, HostScalars | None]:
    """The same step with one input more, the last, for the numbers that the host computes; None if there are none."""
    walk = _ScalarWalk(captured.graph)
    if not walk.slots:
        return captured, None
    try:
        hosted = _feed_scalars(captured, walk)
    except PlanError:  # it does something with a number that has no form for tensors: it stays as it was captured
        return captured, None
    return hosted, HostScalars(walk.reads, walk.formulas, walk.first)


class _ScalarWalk:
    """Goes through a captured graph from operation to operation, and finds what is arithmetic of numbers alone.

    Attributes:
        reads: places of the inputs that are read.
        formulas: how the host's results follow from these.
        first: from these to the first result of each formula.
        slots: nodes whose numbers operations on tensors take, each with its place among the host's results.
        numbers: all nodes that are numbers known to the host, each with what the host computes there.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.reads: list[int] = []
        self.slots: dict[Node, int] = {}
        self.numbers: dict[Node, Node] = {}
        self._host = Graph()
        self._place: dict[Node, int] = {}  # of each of the host's inputs among the reads
        self._kept: dict[Node, Node | None] = {}  # tensors of shape () whose value follows from inputs; None: not read
        self._inputs = graph.graph.find_nodes(op="placeholder")
        for node in graph.graph.nodes:
            self._take(node)
        self.formulas, self.first = self._arranged_source()

    def _arranged_source(self) -> tuple[list[ScalarFormula], Callable[[Sequence[float]], tuple[float, ...]]]:
        """Brings numbers together that come of the same formula; those that come of the same values share a slot."""
        found: dict[Any, dict[tuple[int, ...], list[Node]]] = {}
        for node in self.slots:
            line = _ancestors(self.numbers[node])
            found.setdefault(_formula_key(line), {}).setdefault(self._source_input(line), []).append(node)
        every = [nodes for taken in found.values() for nodes in taken.values()]
        self.slots = {node: place for place, nodes in enumerate(every) for node in nodes}
        firsts = [self.numbers[next(iter(taken.values()))[0]] for taken in found.values()]
        formulas = [
            ScalarFormula(_compile_formula(first), list(taken))
            for first, taken in zip(firsts, found.values(), strict=True)
        ]
        together, places = _compile_formula(*firsts), self._source_input(_ancestors(*firsts))
        return formulas, lambda values: together(*[values[place] for place in places])

    def _source_input(self, line: Sequence[Node]) -> tuple[int, ...]:
        """Places among the reads of the host's inputs that are among the nodes."""
        return tuple([self._place[node] for node in line if node in self._place])

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
            value = self._host.call_function(_round_to_dtype, (value,))
        del self._kept[kept]
        self._kept[node] = value

    def _value(self, kept: Any) -> Node:
        value = self._kept[kept]
        if value is None:
            value = self._kept[kept] = self._host.placeholder(kept.name)
            self._place[value] = len(self.reads)
            self.reads.append(self._inputs.index(kept))
        return value

    def _use(self, node: Node) -> None:
        """An operation on tensors takes numbers; what it might change is not known any more."""
        for given in node.all_input_nodes:
            self._kept.pop(given, None)
            if given in self.numbers:
                self._hand_over(given)

    def _hand_over(self, number: Node) -> None:
        self.slots.setdefault(number, len(self.slots))


def _ancestors(*numbers: Node) -> list[Node]:
    """The nodes that numbers follow from, in order, and their own."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in found:
            for one in node.all_input_nodes:
                visit(one)
            found[node] = None

    for number in numbers:
        visit(number)
    return list(found)


def _formula_key(line: Sequence[Node]) -> tuple[Any, ...]:
    """What is the same for all numbers that are computed in the same way, whatever from."""
    names = {node: f"%{place}" for place, node in enumerate(line)}
    return tuple(
        (node.op, node.target if node.op == "call_function" else "", repr(map_arg(node.args, names.__getitem__)))
        for node in line
    )


def _compile_formula(*numbers: Node) -> Callable[..., tuple[float, ...]]:
    """From the values of the inputs that numbers follow from to the numbers."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in _ancestors(*numbers):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([copies[number] for number in numbers]))
    return GraphModule({}, graph).forward


def _is_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    wide = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    return wide and not value.ndim and value.device.type == "cpu"


def _round_to_dtype(value: float) -> float:
    return ctypes.c_float(value).value


def _feed_scalars(captured: CapturedStep, walk: _ScalarWalk) -> CapturedStep:
    with captured.examples[0].fake_mode:  # type: ignore[attr-defined]
        cells = torch.zeros(sum(len(formula.inputs) for formula in walk.formulas), dtype=torch.float64)
    graph = captured.retraced(lambda *flat: _ScalarFeeder(captured.graph, walk, flat[-1]).run(*flat[:-1]), cells)
    return replace(captured, graph=graph, examples=[*captured.examples, cells])


class _ScalarFeeder(ScalarLifter):
    """Runs a captured graph with the host's numbers out of a tensor."""

    def __init__(self, graph: GraphModule, walk: _ScalarWalk, cells: Tensor) -> None:
        super().__init__(graph)
        self._walk, self._cells = walk, cells

    def run_node(self, n: Node) -> Any:
        if n in self._walk.slots:
            return DeviceScalar(self._cells[self._walk.slots[n]])
        return None if n in self._walk.numbers else super().run_node(n)
