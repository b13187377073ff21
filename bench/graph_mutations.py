"""Mutations of the graph that a step is lowered to: one node at random does something a little, or quite, different.

The step is captured as for a compiler, and then run operation by operation, so that a mutant costs no compilation.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.core.random.rng import generator_for
from hotloop.lowering.build import lower
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.program import Program
from hotloop.lowering.steps import compiled_step
from hotloop.plan import Plan
from hotloop.task import Task

Change = Callable[[Any], Any]
Slot = tuple[Node, int]
"""A reader, and which of its inputs."""


@dataclass(frozen=True)
class Mutation:
    """What was done to a graph.

    Attributes:
        magnitude: relative, where the kind has one; None where it is all or nothing.
    """

    kind: str
    place: str
    magnitude: float | None


@dataclass
class Graphs:
    """Lowers a Task to mutants of its graph, which is captured once; `accumulation` is the plan's."""

    task: Task
    how: str
    accumulation: int = 1
    _captured: CapturedStep | None = field(default=None, init=False)

    def mutant(self, draws: random.Random) -> tuple[Program, Mutation]:
        """A Program whose graph is mutated at random."""
        made: list[Mutation] = []

        def mutate(graph: GraphModule) -> GraphModule:
            graph, mutation = mutated(graph, draws)
            made.append(mutation)
            return graph

        return self.program(mutate), made[0]

    def program(self, change: Callable[[GraphModule], GraphModule] = lambda graph: graph) -> Program:
        """A Program whose graph is changed, or the honest one."""
        real = compiled_step.StepCapture.trace_twice

        def capture_once(capture: compiled_step.StepCapture, batch: Any) -> CapturedStep:
            self._captured = self._captured or real(capture, batch)
            return self._captured

        def built(captured: CapturedStep, parts: LoweringContext) -> compiled_step.Runner:
            graph = change(copy.deepcopy(captured.graph))
            return lambda flat: graph(*flat)

        with (
            mock.patch.object(compiled_step.StepCapture, "trace_twice", capture_once),
            mock.patch.object(compiled_step, "build_program", built),
        ):
            return lower(self.task, Plan(compile=self.how, accumulation=self.accumulation))


def mutated(graph: GraphModule, draws: random.Random) -> tuple[GraphModule, Mutation]:
    """The graph with one mutation at random, of a kind that has a place in it."""
    while True:
        kind = draws.choice(list(KINDS))
        mutation = KINDS[kind](graph, draws)
        if mutation is not None:
            graph.graph.lint()
            graph.recompile()
            return graph, Mutation(kind, *mutation)


def magnitude(draws: random.Random, smallest: float = -8.0) -> float:
    """Log-uniform, up to 1."""
    return float(10 ** draws.uniform(smallest, 0))


# ---------------------------------------------------------------- values

Kind = Callable[[GraphModule, random.Random], tuple[str, float | None] | None]


def _value(make: Callable[[random.Random], tuple[Change, float | None]], fits: Callable[[Any], bool]) -> Kind:
    """A kind that changes what a node gives, for one of its readers or for all."""

    def mutate(graph: GraphModule, draws: random.Random) -> tuple[str, float | None] | None:
        nodes = [node for node in graph.graph.nodes if fits(node.meta.get("val")) and _readers(node)]
        if not nodes:
            return None
        node = draws.choice(nodes)
        slots = _readers(node)
        chosen = slots if draws.random() < 0.5 else [draws.choice(slots)]
        change, size = make(draws)
        first = next(one for one in graph.graph.nodes if one in {reader for reader, _ in chosen})
        with graph.graph.inserting_before(first):
            new = graph.graph.call_function(change, (node,))
        for reader, place in chosen:
            _put(reader, place, node, new)
        return f"{node.name} for {'all' if chosen is slots else chosen[0][0].name}", size

    return mutate


def _readers(node: Node) -> list[Slot]:
    """Where a node's value is read and not written to."""
    found = []
    for user in node.users:
        if user.op == "output":
            found.append((user, 0))
        elif user.op == "call_function":
            written = _written(user)
            found += [
                (user, place)
                for place, given in enumerate([*user.args, *user.kwargs.values()])
                if place not in written and _holds(given, node)
            ]
    return found


def _written(node: Node) -> set[int]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return set()
    return {
        place for place, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write
    }


def _holds(given: Any, node: Node) -> bool:
    return given is node or (isinstance(given, list | tuple) and any(_holds(one, node) for one in given))


def _put(reader: Node, place: int, old: Node, new: Any) -> None:
    def swapped(given: Any) -> Any:
        return torch.fx.map_arg(given, lambda one: new if one is old else one)

    args, names = list(reader.args), list(reader.kwargs)
    if place < len(args):
        args[place] = swapped(args[place])
        reader.args = tuple(args)
    else:
        name = names[place - len(args)]
        reader.kwargs = {**reader.kwargs, name: swapped(reader.kwargs[name])}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | float) or (_is_float(value) and value.numel() == 1)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _has_rows(value: Any) -> bool:
    return _is_tensor(value) and value.ndim > 0 and len(value) > 1


def _is_square(value: Any) -> bool:
    return _is_float(value) and value.ndim == 2 and value.shape[0] == value.shape[1] > 1


def scale(draws: random.Random) -> tuple[Change, float]:
    size = magnitude(draws)
    factor = 1 + draws.choice((-1, 1)) * size
    return (lambda value: value * factor), size


def noise(draws: random.Random) -> tuple[Change, float]:
    size, generator = magnitude(draws), generator_for(draws.getrandbits(40), "noise")

    def noisy(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return value + size * _rms(value) * drawn

    return noisy, size


def offset(draws: random.Random) -> tuple[Change, float]:
    size = magnitude(draws)
    return (lambda value: value + size * _rms(value)), size


def _rms(value: Tensor) -> Tensor:
    return value.square().mean().sqrt()


ROUNDING = {"bf16": (torch.bfloat16, 2.0**-9), "fp16": (torch.float16, 2.0**-12)}


def rounded(draws: random.Random) -> tuple[Change, float]:
    """Through bf16, fp16, or the 10 bits of mantissa of tf32; the magnitude is the largest relative error."""
    name = draws.choice((*ROUNDING, "tf32"))
    if name == "tf32":
        return _through_tf32, 2.0**-11
    dtype, size = ROUNDING[name]
    return (lambda value: value.to(dtype).to(value.dtype)), size


def _through_tf32(value: Tensor) -> Tensor:
    if value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).view_as(value)


def zeroed(draws: random.Random) -> tuple[Change, float]:
    """A share of the elements, the same at each step, but at least one."""
    size, seed = magnitude(draws, -3), draws.getrandbits(40)

    def zeroing(value: Tensor) -> Tensor:
        drawn = torch.rand(value.shape, generator=generator_for(seed, "zeroed"))
        return torch.where(drawn <= max(size, float(drawn.min())), 0, value)

    return zeroing, size


def saturated(draws: random.Random) -> tuple[Change, float]:
    """The largest numbers are cut off."""
    size = magnitude(draws)
    return (lambda value: value.clamp(-(1 - size) * value.abs().max(), (1 - size) * value.abs().max())), size


def flushed(draws: random.Random) -> tuple[Change, float]:
    """Numbers that are small beside the largest become zero."""
    size = magnitude(draws)
    return (lambda value: torch.where(value.abs() < size * value.abs().max(), 0, value)), size


def stale(draws: random.Random) -> tuple[Change, None]:
    """What the node gave so many calls before."""
    age, before = draws.choice((1, 1, 2, 4)), list[Any]()

    def older(value: Any) -> Any:
        before.append(value.clone() if isinstance(value, Tensor) else value)
        return before.pop(0) if len(before) > age else before[0]

    return older, None


def shifted(draws: random.Random) -> tuple[Change, None]:
    return (lambda value: value.roll(1, 0)), None


def transposed(draws: random.Random) -> tuple[Change, None]:
    return (lambda value: value.t().contiguous()), None


# ---------------------------------------------------------------- operations


def skipped(graph: GraphModule, draws: random.Random) -> tuple[str, None] | None:
    """A write in place that is left out."""
    nodes = [node for node in _calls(graph) if _written(node) and not _fills(node)]
    if not nodes:
        return None
    node = draws.choice(nodes)
    place = f"{node.name}"
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)
    return place, None


def _fills(node: Node) -> bool:
    """Whether it writes to memory without content, which would give anything."""
    target = node.args[0]
    return isinstance(target, Node) and "empty" in str(target.target)


def _calls(graph: GraphModule) -> Iterator[Node]:
    return (node for node in graph.graph.nodes if node.op == "call_function")


def constant(graph: GraphModule, draws: random.Random) -> tuple[str, float] | None:
    """A number in the program, such as an epsilon, a share to keep, a decay, a power."""
    places = [
        (node, place)
        for node in _calls(graph)
        for place, given in enumerate([*node.args, *node.kwargs.values()])
        if isinstance(given, float)
    ]
    if not places:
        return None
    node, place = draws.choice(places)
    size = magnitude(draws)
    values, count = [*node.args, *node.kwargs.values()], len(node.args)
    old = values[place]
    values[place] = old * (1 + draws.choice((-1, 1)) * size) if old else size
    node.args = tuple(values[:count])
    node.kwargs = dict(zip(node.kwargs, values[count:], strict=True))
    return f"{node.name} {old:g}", size


_MEANS = ("mean", "nll_loss_forward", "nll_loss_backward", "mse_loss", "mse_loss_backward", "div")


def denominator(graph: GraphModule, draws: random.Random) -> tuple[str, float] | None:
    """A mean over n that divides by n - 1."""
    nodes = [
        node
        for node in _calls(graph)
        if str(node.target).removeprefix("aten.").partition(".")[0] in _MEANS and _count(node) > 1
    ]
    if not nodes:
        return None
    node = draws.choice(nodes)
    count = _count(node)
    users = list(node.users)
    if str(node.target).startswith("aten.nll_loss_forward"):
        node = next((user for user in users if user.args[1] == 0), node)
    with graph.graph.inserting_after(node):
        new = graph.graph.call_function(lambda value: value * (count / (count - 1)), (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return node.name, 1 / (count - 1)


def _count(node: Node) -> int:
    """Over how many numbers, or samples, the mean is; 0 where that can't be told."""
    name = str(node.target)
    if name.startswith("aten.div"):
        given = node.args[1]
        return int(given) if isinstance(given, int | float) and given == int(given) else 0
    source = node.args[1 if "backward" in name else 0]
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(value, Tensor) or not value.ndim:
        return 0
    out = node.meta.get("val")
    if name.startswith("aten.mean") and isinstance(out, Tensor):
        return value.numel() // max(1, out.numel())
    return len(value) if "nll" in name else value.numel()


def dropped(graph: GraphModule, draws: random.Random) -> tuple[str, None] | None:
    """A sum, or a product, with one of its terms alone."""
    nodes = [
        node
        for node in _calls(graph)
        if str(node.target) in ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor")
        and all(isinstance(given, Node) for given in node.args[:2])
        and all(_alike(given, node) for given in node.args[:2])
    ]
    if not nodes:
        return None
    node = draws.choice(nodes)
    place = node.name
    node.replace_all_uses_with(node.args[draws.randrange(2)])
    graph.graph.erase_node(node)
    return place, None


def swapped(graph: GraphModule, draws: random.Random) -> tuple[str, None] | None:
    """An operation with its two inputs the other way round."""
    names = ("aten.sub.Tensor", "aten.div.Tensor", "aten.mm.default", "aten.bmm.default", "aten.threshold_backward")
    nodes = [
        node
        for node in _calls(graph)
        if str(node.target).startswith(names)
        and all(isinstance(given, Node) for given in node.args[:2])
        and _alike(node.args[0], node.args[1])
    ]
    if not nodes:
        return None
    node = draws.choice(nodes)
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return node.name, None


def _alike(one: Node, other: Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype


def drawn_before(graph: GraphModule, draws: random.Random) -> tuple[str, None] | None:
    """One number drawn too many, so that a random layer gets other draws."""
    nodes = [
        node
        for node in _calls(graph)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node.users
    ]
    if not nodes:
        return None
    node = draws.choice(nodes)
    with graph.graph.inserting_before(node):
        graph.graph.call_function(torch.rand, (1,))
    return node.name, None


KINDS: dict[str, Kind] = {
    "scaled": _value(scale, _is_float),
    "scaled number": _value(scale, _is_number),
    "noise": _value(noise, _is_float),
    "offset": _value(offset, _is_float),
    "rounded": _value(rounded, _is_float),
    "zeroed": _value(zeroed, _is_float),
    "saturated": _value(saturated, _is_float),
    "flushed": _value(flushed, _is_float),
    "stale": _value(stale, _is_tensor),
    "stale number": _value(stale, _is_number),
    "shifted by a row": _value(shifted, _has_rows),
    "transposed": _value(transposed, _is_square),
    "write left out": skipped,
    "constant": constant,
    "denominator n - 1": denominator,
    "term dropped": dropped,
    "operands swapped": swapped,
    "one more draw": drawn_before,
}
