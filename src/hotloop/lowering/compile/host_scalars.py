"""Computes a captured step's arithmetic on numbers on the host, and passes the results to the compiled step.

An optimizer derives numbers for the update from its step count, such as Adam's bias corrections `1 - beta ** step`
(Kingma and Ba: Adam, ICLR 2015, algorithm 1). Inductor would put the powers into the loop over a parameter's elements:
on a CPU a small network's step then takes three times as long. So Python computes the numbers, once for all parameters
with the same count, and the compiled step reads them from one small tensor.
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
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from hotloop.core.torch_private import OpOverload
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
"""In-place operations on an optimizer's number (a tensor of shape ()) before the step reads it, as Python operators."""


@dataclass(frozen=True)
class ScalarFormula:
    """The formula of one kind of number, of which each parameter may have one.

    Attributes:
        compute: from the formula's inputs to `(number,)`.
        inputs: the places of the inputs among the reads, for each number of the kind.
    """

    compute: Callable[..., tuple[float, ...]]
    inputs: Sequence[tuple[int, ...]]

    def each(self, values: Sequence[float]) -> list[float]:
        """Returns the numbers of the kind; equal inputs are computed once."""
        inputs = [tuple([values[place] for place in places]) for places in self.inputs]
        results = {operands: self.compute(*operands)[0] for operands in set(inputs)}
        return [results[operands] for operands in inputs]


class HostScalars:
    """Computes the host's numbers before each step.

    Args:
        reads: places of the tensors to read among the tensors of the step: shape (), on the CPU.
        formulas: formulas of the numbers that the step takes, in their order.
        first: from all reads to the first number of each formula.
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
        # inputs of all parameters in the same place of a formula, such as their step counts; usually equal
        self._peers = [operator.itemgetter(*places) for places in peers if len(places) > 1]
        self._reads = reads
        self._bound: list[Tensor] = []
        self._readers: list[Callable[[], float]] = []

    def __call__(self, flat: Sequence[Tensor]) -> Tensor:
        """Returns the numbers as a float64 tensor, shape (numbers,); the same tensor each time."""
        bound = [flat[place] for place in self._reads]
        if not self._bound or not all(map(operator.is_, bound, self._bound)):
            self._bind(bound)
        values = [read() for read in self._readers]
        for peers in self._peers:
            peer_values = peers(values)
            if peer_values.count(peer_values[0]) < len(peer_values):
                return self._each(values)
        for cells, number in zip(self._parts, self._first(values), strict=True):
            cells.fill(number)
        return self._cells

    def _each(self, values: Sequence[float]) -> Tensor:
        """Computes all numbers; needed if parameters differ in their step counts, or groups in their settings."""
        for cells, formula in zip(self._parts, self._formulas, strict=True):
            cells[:] = formula.each(values)
        return self._cells

    def _bind(self, tensors: list[Tensor]) -> None:
        """Creates the readers: an array that shares a tensor's memory reads faster than `Tensor.item`."""
        self._bound = tensors
        self._readers = [value.detach().numpy().item for value in tensors]


def split_host_scalars(captured: CapturedStep) -> tuple[CapturedStep, HostScalars | None]:
    """Returns the step with the host's numbers as its last input, and HostScalars; None if it has no such numbers."""
    walk = _ScalarWalk(captured.graph)
    if not walk.slots:
        return captured, None
    try:
        hosted = _feed_scalars(captured, walk)
    except PlanError:  # an operation on a number has no form for tensors
        return captured, None
    return hosted, HostScalars(walk.reads, walk.formulas, walk.first)


class _ScalarWalk:
    """Walk over a captured graph that finds the arithmetic on numbers alone.

    Attributes:
        reads: places of the inputs that the host reads.
        formulas: formulas of the host's results.
        first: from the reads to the first result of each formula.
        slots: nodes whose numbers are operands of tensor operations, with their place among the host's results.
        numbers: all nodes that are numbers known to the host, with the host's node.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.reads: list[int] = []
        self.slots: dict[Node, int] = {}
        self.numbers: dict[Node, Node] = {}
        self._host = Graph()
        self._place: dict[Node, int] = {}  # place among the reads of each of the host's inputs
        self._tensors: dict[
            Node, Node | None
        ] = {}  # known tensors of shape () with the host's node; None: not read yet
        self._inputs = graph.graph.find_nodes(op="placeholder")
        for node in graph.graph.nodes:
            self._take(node)
        self.formulas, self.first = self._group_by_formula()

    def _group_by_formula(self) -> tuple[list[ScalarFormula], Callable[[Sequence[float]], tuple[float, ...]]]:
        """Groups numbers by formula; numbers with equal inputs share a slot."""
        groups: dict[Any, dict[tuple[int, ...], list[Node]]] = {}
        for node in self.slots:
            line = _ancestors(self.numbers[node])
            groups.setdefault(_formula_key(line), {}).setdefault(self._read_places(line), []).append(node)
        same_number = [nodes for group in groups.values() for nodes in group.values()]
        self.slots = {node: place for place, nodes in enumerate(same_number) for node in nodes}
        firsts = [self.numbers[next(iter(group.values()))[0]] for group in groups.values()]
        formulas = [
            ScalarFormula(_compile_formula(first), list(group))
            for first, group in zip(firsts, groups.values(), strict=True)
        ]
        compute, places = _compile_formula(*firsts), self._read_places(_ancestors(*firsts))
        return formulas, lambda values: compute(*[values[place] for place in places])

    def _read_places(self, line: Sequence[Node]) -> tuple[int, ...]:
        """Returns the places among the reads of the host's inputs among the nodes."""
        return tuple([self._place[node] for node in line if node in self._place])

    def _take(self, node: Node) -> None:
        if node.op == "placeholder":
            if _is_number(node):
                self._tensors[node] = None
        elif node.op == "call_function":
            if node.target is aten._local_scalar_dense.default and node.args[0] in self._tensors:
                self.numbers[node] = self._value(node.args[0])
            elif node.target in _IN_PLACE and self._changes_number(node):
                self._change(node)
            elif not isinstance(node.target, OpOverload) and self._follows(node):
                self.numbers[node] = self._host.node_copy(node, self.numbers.__getitem__)
            else:
                self._use(node)

    def _follows(self, node: Node) -> bool:
        operands = node.all_input_nodes
        return bool(operands) and all(operand in self.numbers for operand in operands)

    def _changes_number(self, node: Node) -> bool:
        """Whether an in-place operation turns a known number into another known number."""
        tensor, *others = node.args
        are_known = all(isinstance(other, int | float) or other in self.numbers for other in others)
        return tensor in self._tensors and are_known and not node.kwargs

    def _change(self, node: Node) -> None:
        """Records the in-place change of a number, rounded to its tensor's dtype."""
        tensor: Any = node.args[0]
        other = self.numbers.get(node.args[1], node.args[1])  # type: ignore[arg-type]
        if isinstance(node.args[1], Node):
            self._hand_over(node.args[1])
        value = self._host.call_function(_IN_PLACE[node.target], (self._value(tensor), other))
        if node.meta["val"].dtype == torch.float32:
            value = self._host.call_function(_round_to_float32, (value,))
        del self._tensors[tensor]
        self._tensors[node] = value

    def _value(self, tensor: Any) -> Node:
        value = self._tensors[tensor]
        if value is None:
            value = self._tensors[tensor] = self._host.placeholder(tensor.name)
            self._place[value] = len(self.reads)
            self.reads.append(self._inputs.index(tensor))
        return value

    def _use(self, node: Node) -> None:
        """Records numbers as operands of a tensor operation; tensors that the operation may change become unknown."""
        for operand in node.all_input_nodes:
            self._tensors.pop(operand, None)
            if operand in self.numbers:
                self._hand_over(operand)

    def _hand_over(self, number: Node) -> None:
        self.slots.setdefault(number, len(self.slots))


def _ancestors(*numbers: Node) -> list[Node]:
    """Returns the nodes from which numbers are computed, in order, and the numbers themselves."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in found:
            for operand in node.all_input_nodes:
                visit(operand)
            found[node] = None

    for number in numbers:
        visit(number)
    return list(found)


def _formula_key(line: Sequence[Node]) -> tuple[Any, ...]:
    """Returns a key that is equal for numbers with the same formula, independent of its inputs."""
    names = {node: f"%{place}" for place, node in enumerate(line)}
    return tuple(
        (node.op, node.target if node.op == "call_function" else "", repr(map_arg(node.args, names.__getitem__)))
        for node in line
    )


def _compile_formula(*numbers: Node) -> Callable[..., tuple[float, ...]]:
    """Returns a function from the values of the host's inputs to the numbers."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in _ancestors(*numbers):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([copies[number] for number in numbers]))
    return GraphModule({}, graph).forward


def _is_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    is_float = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
    return is_float and not value.ndim and value.device.type == "cpu"


def _round_to_float32(value: float) -> float:
    return ctypes.c_float(value).value


def _feed_scalars(captured: CapturedStep, walk: _ScalarWalk) -> CapturedStep:
    with captured.examples[0].fake_mode:  # type: ignore[attr-defined]
        cells = torch.zeros(sum(len(formula.inputs) for formula in walk.formulas), dtype=torch.float64)
    graph = captured.retraced(lambda *flat: _ScalarFeeder(captured.graph, walk, flat[-1]).run(*flat[:-1]), cells)
    return replace(captured, graph=graph, examples=[*captured.examples, cells])


class _ScalarFeeder(ScalarLifter):
    """Interpreter of a captured graph that takes the host's numbers from a tensor."""

    def __init__(self, graph: GraphModule, walk: _ScalarWalk, cells: Tensor) -> None:
        super().__init__(graph)
        self._walk, self._cells = walk, cells

    def run_node(self, n: Node) -> Any:
        if n in self._walk.slots:
            return DeviceScalar(self._cells[self._walk.slots[n]])
        return None if n in self._walk.numbers else super().run_node(n)
