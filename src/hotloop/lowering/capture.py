"""Captures the training step as one graph of tensor operations, from which a compiler makes one program.

The step runs once on tensors without content, under torch's tracer. What it does with them is the graph; what Python
does beside them happens once and never again. So everything that could differ from step to step in Python is looked
for, and refused: attributes that change, buffers that are replaced, draws from Python's or NumPy's generators, branches
on the value of a tensor.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module

from hotloop.errors import PlanError, blame
from hotloop.lowering.step import EagerStep

Values = dict[str, Any]


@dataclass(frozen=True)
class Captured:
    """One step as a graph.

    Attributes:
        graph: takes the leaves of `(tensors of the step, batch)`, changes the former in place, and returns
            `(loss, *scalars, *gradients)`; gradients only where the update is not part of it.
        examples: tensors without content, of the shapes, dtypes and strides that the graph is for.
        scalars: names of the further scalars.
        gradients: names of the parameters whose gradients are returned.
    """

    graph: GraphModule
    examples: Sequence[Tensor]
    scalars: tuple[str, ...]
    gradients: tuple[str, ...]


def step_tensors(step: EagerStep, hyper: dict[str, Tensor], *, whole: bool) -> Values:
    """What a step reads and changes, by name: of the whole step, or of forward and backward alone."""
    model, loss = step.parts.model, step.parts.task.loss
    values: Values = {
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "loss": dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {},
    }
    if whole:
        names = {id(value): name for name, value in model.named_parameters()}
        values["state"] = {
            names[id(parameter)]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for parameter, state in step.optimizer.state.items()
        }
        values["average"] = step.average
        values["hyper"] = hyper
    return values


def capture(step: EagerStep, batch: Any, samples: int, hyper: dict[str, Tensor], *, whole: bool) -> Captured:
    """The graph of one step on batches like `batch`; nothing is computed, and nothing changes.

    Raises:
        PlanError: the step can't be captured, or would not be the same step after step.
    """
    tracer = _Tracer(step, whole)
    values = (step_tensors(step, hyper, whole=whole), batch)
    first, second = (tracer.trace(values) for _ in range(2))
    if first.graph.code != second.graph.code:
        raise _refused("two runs of it do different operations", "a step that is the same each time")
    return second


class _Tracer:
    def __init__(self, step: EagerStep, whole: bool) -> None:
        self.step, self.whole = step, whole
        self.names = {id(value): name for name, value in step.parts.model.named_parameters()}
        self.scalars: tuple[str, ...] = ()
        self.gradients: tuple[str, ...] = ()

    def trace(self, values: Any) -> Captured:
        leaves, spec = pytree.tree_flatten(values)
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if others:
            raise _refused(f"a batch holds {type(others[0]).__name__}", "batches of tensors alone")
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
        examples = [mode.from_tensor(leaf, static_shapes=True) for leaf in leaves]
        before = _attributes(self.step.parts.model)
        drawn = _drawn()
        # oneDNN's fused layers, such as its LSTM, are operations that the compiler doesn't know.
        on_cpu = self.step.parts.device.type == "cpu"
        plain = torch.backends.mkldnn.flags(enabled=False) if on_cpu else nullcontext()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those that matter came when the step ran eagerly
                with mode, plain:
                    run = make_fx(lambda *flat: self.run(*pytree.tree_unflatten(list(flat), spec)), _WRITTEN_OUT)
                    graph = run(*examples)
        except PlanError:
            raise
        except Exception as error:
            raise _refused(blame(error), "tensor operations that don't ask for a tensor's value") from error
        if drawn != _drawn():
            raise _refused("it draws from Python's or NumPy's generator", "draws from torch's generator alone")
        _check_attributes(before, _attributes(self.step.parts.model))
        return Captured(graph, examples, self.scalars, self.gradients)

    def run(self, values: Values, batch: Any) -> tuple[Tensor, ...]:
        """One step on the given tensors, in place of the step's own."""
        parts = self.step.parts
        live = {name: value.detach().requires_grad_(self.trained(name)) for name, value in values["parameters"].items()}
        buffers = values["buffers"]
        loss = parts.task.loss if isinstance(parts.task.loss, nn.Module) else nn.Module()
        with (
            torch.enable_grad(),
            _reparametrize_module(parts.model, {**live, **buffers}, tie_weights=True),
            _reparametrize_module(loss, values["loss"]),
        ):
            computed = parts.compute(parts.model, batch)
            _check_buffers(parts.model, buffers)
        wanted = {name: value for name, value in live.items() if value.requires_grad}
        found = torch.autograd.grad(computed.loss, list(wanted.values()), allow_unused=True)
        gradients = {name: value for name, value in zip(wanted, found, strict=True) if value is not None}
        self.scalars = tuple(computed.scalars)
        outputs = (computed.loss.detach(), *(value.detach() for value in computed.scalars.values()))
        if not self.whole:
            self.gradients = tuple(gradients)
            return (*outputs, *gradients.values())
        with torch.no_grad():
            self.update(values, gradients)
        return outputs

    def trained(self, name: str) -> bool:
        return self.step.parts.model.get_parameter(name).requires_grad

    def update(self, values: Values, gradients: dict[str, Tensor]) -> None:
        """Clipping, the optimizer's own `step`, and the average, on the given tensors."""
        step, optimizer = self.step, self.step.optimizer
        parameters = values["parameters"]
        groups, state = [dict(group) for group in optimizer.param_groups], optimizer.state
        for name, value in gradients.items():
            parameters[name].grad = value
        try:
            swapped: Any = type(state)(dict)
            for group in optimizer.param_groups:
                names = [self.names[id(parameter)] for parameter in group["params"]]
                for name, parameter in zip(names, group["params"], strict=True):
                    if parameter in state:
                        swapped[parameters[name]] = {**state[parameter], **values["state"].get(name, {})}
                group["params"] = [parameters[name] for name in names]
                group.update({key: False for key in ("foreach", "fused") if key in group})  # the compiler fuses it
            optimizer.state = swapped
            now = hyper_of(optimizer)
            for place, value in values["hyper"].items():
                number = value.item()
                if now[place]:
                    torch._check(number != 0)  # optimizers ask, since without momentum they do something else
                _put(optimizer, place, number)
            step.clip([value for group in optimizer.param_groups for value in group["params"]])
            inspect.unwrap(type(optimizer).step)(optimizer)
            _check_state(swapped, {parameters[name]: name for name in parameters}, values["state"])
        finally:
            optimizer.state = state
            for group, original in zip(optimizer.param_groups, groups, strict=True):
                group.update(original)
            for value in parameters.values():
                value.grad = None
        if values["average"]:
            step.update_average(list(values["average"].values()), [parameters[name] for name in values["average"]])


def _lerp_(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.add_((end - start) * weight)


# The compiler's own form asks whether the weight is below a half, which a schedule's number doesn't tell before it runs.
_WRITTEN_OUT = {torch.ops.aten.lerp_.Scalar: _lerp_}


def hyper_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers of an optimizer's groups by place, such as `0/lr` and `1/betas/0`."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            for place, item in enumerate(value) if isinstance(value, tuple | list) else [(None, value)]:
                if isinstance(item, float) or (isinstance(item, int) and not isinstance(item, bool)):
                    found[f"{number}/{key}" if place is None else f"{number}/{key}/{place}"] = float(item)
    return found


def _drawn() -> Any:
    """How far Python's and NumPy's generators are."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["pos"], state["has_gauss"]


def _put(optimizer: torch.optim.Optimizer, place: str, value: Any) -> None:
    number, key, *rest = place.split("/")
    group = optimizer.param_groups[int(number)]
    if rest:
        value = tuple(value if at == int(rest[0]) else item for at, item in enumerate(group[key]))
    group[key] = value


def _refused(why: str, expected: str) -> PlanError:
    return PlanError(
        f"the step can't be captured as one graph: {why}",
        expected=expected,
        fix="mend that line, or choose compile=none",
    )


def _attributes(model: nn.Module) -> dict[str, Any]:
    """The plain values that modules hold beside their tensors."""
    plain = bool | int | float | str | None
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, plain) and not key.startswith("_")
    }


def _check_attributes(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [
        name for name in after if before.get(name, after[name]) is not after[name] and before.get(name) != after[name]
    ]
    changed += [name for name in after if name not in before]
    if changed:
        raise _refused(
            f"it changes the attribute {changed[0]!r} of the model, which would happen once", "a buffer for it"
        )


def _check_buffers(model: nn.Module, given: dict[str, Tensor]) -> None:
    """A buffer that is replaced, rather than changed in place, would stay as it was."""
    for name, value in model.named_buffers():
        if name in given and value is not given[name]:
            raise _refused(f"it replaces the buffer {name!r} by another tensor", "a buffer that is changed in place")


def _check_state(state: Any, names: dict[Tensor, str], given: dict[str, dict[str, Tensor]]) -> None:
    """The optimizer keeps the tensors that it has."""
    for parameter, name in names.items():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value is not given.get(name, {}).get(key):
                raise _refused(f"the optimizer replaces its {key!r} of {name!r}", "an optimizer that updates in place")
