"""Conversion of a torch model to a graph of layers: torch.fx traces the forward pass, and each call becomes a layer.

torch.fx (Reed et al., MLSys 2022) runs `forward` once on a proxy that records the operations. So a user's own forward
is known if all its modules and functions are, and if it always calls the same ones.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from hotloop import arrays
from hotloop.arrays.graph import INPUT, Graph
from hotloop.arrays.layer import Layer
from hotloop.errors import PlanError, type_name
from hotloop.lowering.arrays_engine.registry import (
    FUNCTIONS,
    IN_PLACE_FUNCTIONS,
    MODULES,
    SUM_FUNCTIONS,
    VIEW_FUNCTIONS,
    UnsupportedSetting,
    layer_of_function,
    layer_of_module,
)

_KNOWN_LAYERS = ", ".join(sorted(module.__name__ for module in MODULES))


def unsupported_error(what: str, expected: str = "") -> PlanError:
    return PlanError(f"engine=arrays doesn't support {what}", expected=expected, fix="use engine=eager")


def module_label(path: str, module: nn.Module) -> str:
    """Returns the module's name in messages."""
    return f"{path!r} ({type(module).__name__})" if path else f"the model, {type_name(module)}"


@dataclass(frozen=True)
class LayerCall:
    """A layer of the graph.

    Attributes:
        module: its module; None for a function.
        path: the module's name in the model; for a function the name of the module whose forward calls it.
        layer: the layer that computes the same.
    """

    module: nn.Module | None
    path: str
    layer: Layer


def trace_layers(model: nn.Module) -> tuple[Graph, list[LayerCall]]:
    """Returns the model as a graph of layers without weights, and the call of each layer.

    Raises:
        PlanError: a call is unknown, has a setting that its layer lacks, or depends on the values of tensors.
    """
    with _in_training_mode(model):
        walk = _GraphWalk(model)
        for node in _graph(model).nodes:
            walk.convert(node)
    used = {name for _, *inputs in walk.nodes.values() for name in inputs} | {walk.result}
    for name in walk.nodes:
        if name not in used:
            raise unsupported_error(f"{name!r}, whose result nothing uses", "a model that uses what it computes")
    if next(reversed(walk.nodes), INPUT) != walk.result:
        walk.nodes["(result)"] = (arrays.Identity(), walk.result)
    return Graph(walk.nodes), walk.calls


@contextmanager
def _in_training_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --- what forward calls


class _Tracer(fx.Tracer):
    record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m)


def _is_leaf(module: nn.Module) -> bool:
    """Checks whether the trace enters a module: not those of torch, except containers, and not subclasses of known
    ones.
    """
    return isinstance(module, tuple(MODULES)) or (
        type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)
    )


def _graph(model: nn.Module) -> fx.Graph:
    if _is_leaf(model):
        graph = fx.Graph()
        graph.output(graph.create_node("call_module", "", (graph.placeholder(INPUT),)))
        return graph
    before = _generators()
    try:
        found = _Tracer().trace(model)
    except Exception as error:  # a forward may raise anything when it gets a proxy
        reason = str(error).splitlines()[0].partition(". ")[0] if str(error) else type(error).__name__
        raise unsupported_error(
            f"the model, {type_name(model)}, whose forward can't be traced at "
            f"{_user_line(_module_frames(error))}: {reason}",
            "a model that calls the same modules and functions for all inputs",
        ) from error
    if _generators() != before:
        raise unsupported_error(
            f"the model, {type_name(model)}, whose forward draws random numbers of its own",
            "nn.Dropout or F.dropout, which draw them anew in each step",
        )
    return found


def _generators() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes()


def _module_frames(error: Exception) -> str:
    lines, trace = [], error.__traceback__
    while trace is not None:
        lines.append(f'File "{trace.tb_frame.f_code.co_filename}", line {trace.tb_lineno}')
        trace = trace.tb_next
    return "\n".join(lines)


def _user_line(stack: str | None) -> str:
    """Returns the innermost line of a stack outside torch and this file, as `file:line`."""
    own = (str(Path(torch.__file__).parent), __file__)
    places = re.findall(r'File "(.*)", line (\d+)', stack or "")
    lines = [place for place in places if not place[0].startswith(own)]
    return ":".join(lines[-1]) if lines else "an unknown place"


# --- calls as layers


@dataclass(frozen=True)
class _Shape:
    pass


@dataclass(frozen=True)
class _Size:
    """A size from a shape, or computed from sizes; `is_batch` for the number of samples."""

    is_batch: bool


@dataclass(frozen=True)
class _States:
    """Last states of the recurrent module with output `of`; `depth` indices lead to h."""

    of: str
    depth: int


@dataclass(frozen=True)
class _Recurrent:
    """All results of a recurrent module with output `of`."""

    of: str
    states: _States


class _GraphWalk:
    """Converts call after call.

    Attributes:
        nodes: of the graph so far.
        calls: those with a layer so far.
        result: name of the model's result.
    """

    def __init__(self, model: nn.Module) -> None:
        self.nodes: dict[str, tuple[Any, ...]] = {}
        self.calls: list[LayerCall] = []
        self.result = INPUT
        self._model = model
        self._values: dict[fx.Node, Any] = {}

    def convert(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._input(node)
        elif node.op == "output":
            self.result = self._tensor(node.args[0], node)
        elif node.op == "call_module":
            self._values[node] = self._of_module(node)
        elif node.op in ("call_function", "call_method"):
            self._values[node] = self._of_function(node)
        else:
            raise unsupported_error(f"{node.target!r}, which {self._module_called(self._path(node))} uses by itself")

    def _input(self, node: fx.Node) -> None:
        if self._values:
            raise unsupported_error(f"the model, {type_name(self._model)}, whose forward has several inputs", "one")
        self._values[node] = INPUT

    def _of_module(self, node: fx.Node) -> Any:
        path = str(node.target)
        module = self._model.get_submodule(path)
        name = module_label(path, module)
        if type(module) not in MODULES:
            raise unsupported_error(name, f"modules that are known: {_KNOWN_LAYERS}")
        try:
            layer = layer_of_module(module)
        except UnsupportedSetting as setting:
            raise unsupported_error(f"{name} with {setting}") from None
        if len(node.args) != 1 or node.kwargs:
            raise unsupported_error(f"{name}, which is called with more than a tensor")
        given = self._tensor(node.args[0], node)
        if isinstance(layer, arrays.Embedding) and given != INPUT:
            raise unsupported_error(f"{name} behind another module", "whole numbers, as the data has")
        self._check_in_place(node, getattr(module, "inplace", False))
        added = self._add(path or "model", LayerCall(module, path, layer), given)
        if not isinstance(layer, arrays.LSTM | arrays.RNN):
            return added
        return _Recurrent(added, _States(added, 2 if isinstance(layer, arrays.LSTM) else 1))

    def _of_function(self, node: fx.Node) -> Any:
        if (size := self._size(node)) is not None:
            return size
        self._check_in_place(node, bool(node.kwargs.get("inplace")) or node.target in IN_PLACE_FUNCTIONS)
        if node.target is getattr:
            raise self._unsupported(node)
        first = self._value(node.args[0]) if node.args else None
        if node.target in SUM_FUNCTIONS:
            return self._sum(node)
        if isinstance(first, _Recurrent | _States):
            return self._of_recurrent(node, first)
        try:
            layer = self._layer(node)
        except UnsupportedSetting as setting:
            raise self._unsupported(node, f" with {setting}") from None
        return self._add_function(node, layer, self._tensor(node.args[0], node))

    def _layer(self, node: fx.Node) -> Layer:
        rest = [self._value(one) for one in node.args[1:]]
        if node.target in ("view", "reshape", torch.reshape):
            return _reshape_layer(rest)
        if node.target is operator.getitem:
            return _select_layer(rest[0])
        if node.target not in FUNCTIONS or not node.args:
            raise self._unsupported(node)
        return layer_of_function(node.target, rest, {key: self._value(value) for key, value in node.kwargs.items()})

    def _sum(self, node: fx.Node) -> str:
        values = [self._value(one) for one in node.args]
        if len(values) != 2 or node.kwargs or not all(isinstance(one, str) for one in values):
            raise self._unsupported(node, " of anything but two tensors")
        return self._add_function(node, arrays.Identity(), *values)

    def _of_recurrent(self, node: fx.Node, given: Any) -> Any:
        """Returns a selected result of a recurrent module, or the node of its last state."""
        if node.target is operator.getitem and isinstance(given, _Recurrent) and node.args[1] in (0, 1):
            return given.of if node.args[1] == 0 else given.states
        if isinstance(given, _States) and given.depth == 2 and node.target is operator.getitem and node.args[1] == 0:
            return _States(given.of, 1)
        last = (operator.getitem, (0,)), (operator.getitem, (-1,)), ("squeeze", (0,))
        if isinstance(given, _States) and given.depth == 1 and (node.target, node.args[1:]) in last:
            return self._add_function(node, arrays.At(-1), given.of)
        raise self._unsupported(node, " of what a recurrent module gives")

    def _size(self, node: fx.Node) -> _Shape | _Size | None:
        """Returns the shape or size that a call computes; None for another call."""
        values = [self._value(one) for one in node.args]
        if node.target is getattr and values[1:] == ["shape"]:
            return _Shape()
        if node.target == "size":
            return _Size(values[1] == 0) if len(values) > 1 else _Shape()
        if node.target is operator.getitem and values[0] == _Shape() and isinstance(values[1], int):
            return _Size(values[1] == 0)
        numbers = [one for one in values if not isinstance(one, int)]
        return _Size(False) if numbers and all(isinstance(one, _Size) for one in numbers) else None

    # --- names and places

    def _value(self, given: Any) -> Any:
        return fx.node.map_arg(given, lambda node: self._values[node])

    def _tensor(self, given: Any, node: fx.Node) -> str:
        value = self._value(given)
        if not isinstance(value, str) or not isinstance(given, fx.Node):
            what = "the model's result" if node.op == "output" else f"what {self._call_name(node)} gets"
            raise unsupported_error(f"{what}, which is no tensor by itself", "one tensor")
        return value

    def _add(self, base: str, call: LayerCall, *given: str) -> str:
        name, number = base, 1
        while name in self.nodes or name == INPUT:
            number += 1
            name = f"{base}#{number}"
        self.nodes[name] = (call.layer, *given)
        self.calls.append(call)
        return name

    def _add_function(self, node: fx.Node, layer: Layer, *given: str) -> str:
        path = self._path(node)
        return self._add(
            f"{path}.{_operation_name(node)}" if path else _operation_name(node), LayerCall(None, path, layer), *given
        )

    def _path(self, node: fx.Node) -> str:
        """Returns the module whose forward makes the call; empty for the model itself."""
        return next(reversed(node.meta.get("nn_module_stack", {})), "")

    def _module_called(self, path: str) -> str:
        return module_label(path, self._model.get_submodule(path))

    def _call_name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return self._module_called(str(node.target))
        what = "method" if node.op == "call_method" else "function"
        return f"the {what} {_operation_name(node)} in {self._module_called(self._path(node))} at {_user_line(node.stack_trace)}"

    def _unsupported(self, node: fx.Node, how: str = "") -> PlanError:
        return unsupported_error(f"{self._call_name(node)}{how}")

    def _check_in_place(self, node: fx.Node, in_place: bool) -> None:
        """Rejects an in-place change of a tensor with another use: layers don't change their inputs."""
        given: Any = node.args[0] if node.args else None
        while in_place and isinstance(given, fx.Node):
            if len(given.users) > 1:
                where = f" at {_user_line(node.stack_trace)}" if node.stack_trace else ""
                name = f"{node.target!r}" if node.op == "call_module" else _operation_name(node)
                raise unsupported_error(
                    f"{name}{where}, which changes in place what is used elsewhere too", "inplace=False there"
                )
            given = given.args[0] if self._is_view(given) and given.args else None

    def _is_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._model.get_submodule(str(node.target)), nn.Flatten | nn.Identity)
        return node.target in VIEW_FUNCTIONS


def _operation_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def _reshape_layer(sizes: list[Any]) -> Layer:
    """Converts `view` and `reshape` that keep the samples apart; at most one other size may be open."""
    first, *rest = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    open_sizes = [one for one in rest if one == -1 or isinstance(one, _Size)]
    samples = first == _Size(True) or (first == -1 and not open_sizes)
    if not samples or len(open_sizes) > 1 or _Size(True) in rest:
        raise UnsupportedSetting("sizes that may mix the samples")
    return arrays.Reshape([one if isinstance(one, int) else -1 for one in rest])


def _select_layer(index: Any) -> Layer:
    """Converts `x[:, 3]`, one step of a sequence."""
    every = slice(None)
    first, step, *rest = index if isinstance(index, tuple) and len(index) > 1 else (None, None)
    if first != every or not isinstance(step, int) or any(one not in (every, ...) for one in rest):
        raise UnsupportedSetting("an index that isn't [:, a number]")
    return arrays.At(step)
