"""Captures the training step as one graph of tensor operations, which a compiler turns into one program.

The step runs once on fake tensors under torch's tracer. The graph records its tensor operations; Python code beside
them runs only once. So capture refuses all Python state that may differ from step to step: changed attributes, replaced
buffers, draws from Python's or NumPy's generators, branches on a tensor's value.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module

from hotloop.core.reporter import silence_loggers
from hotloop.core.torch_private import FakeTensorMode
from hotloop.data.batch_tree import flatten_tree
from hotloop.errors import PlanError, describe_error, type_name
from hotloop.lowering.compile.compiled_rng import check_draws, check_recurrent, refuse_rng_reset
from hotloop.lowering.compile.guards import (
    check_batch,
    check_constants,
    check_overlaps,
    graph_constants,
    have_same_constants,
)
from hotloop.lowering.compile.inductor_patches import DECOMPOSITIONS, fix_graph_for_inductor, trace_mode
from hotloop.lowering.compile.inputs import (
    StepTensors,
    group_numbers,
    put_value,
    scalars_by_place,
    step_tensors,
    tensors_by_place,
)
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.side_effects import capture_error, refuse_side_effects, refuse_update_side_effects
from hotloop.lowering.transforms.accumulation import accumulate_on_device
from hotloop.lowering.transforms.optimizer import bare_step, describe_update_hook, lay_out_gradients, zero_subnormals
from hotloop.task import StepResult, first_hooked_parameter


@dataclass(frozen=True)
class CapturedStep:
    """One step as a graph.

    Attributes:
        graph: takes the leaves of `(tensors of the step, batch)`, changes the former in place, and returns
            `(loss, *scalars, *gradients)`; gradients, scaled like the loss, only if the graph has no update.
        examples: fake tensors of the shapes, dtypes and strides that the graph is for.
        scalars: names of the further scalars.
        gradients: names of the parameters whose gradients are returned.
    """

    graph: GraphModule
    examples: Sequence[Tensor]
    scalars: tuple[str, ...]
    gradients: tuple[str, ...]

    def retraced(self, run: Callable[..., Any], *further: Tensor) -> GraphModule:
        """Traces `run` on the examples and on `further` fake tensors, in the same mode as the capture."""
        mode = self.examples[0].fake_mode  # type: ignore[attr-defined]
        with mode, trace_mode(), torch.no_grad():
            return make_fx(run)(*self.examples, *further)


UpdateStyle = Literal["singly", "in_lists", "as_set"]
"""How the update is captured: per parameter, which a compiler fuses with the code before; over lists; or as set."""


def capture_step(
    step: EagerStep, batch: Any, samples: int, hyper: dict[str, Tensor], *, whole: bool, update: UpdateStyle = "singly"
) -> CapturedStep:
    """Returns the graph of one step on batches like `batch`; nothing is computed or changed. See `StepCapture`."""
    return StepCapture(step, samples, hyper, whole=whole, update=update).trace_twice(batch)


class StepCapture:
    """Captures a step, once or repeatedly, with the same settings.

    Args:
        hyper: a float64 for each number of the optimizer that may change, by place; the others become constants.
        whole: includes clipping, update and average.

    Attributes:
        once_s: seconds of the last trace.
    """

    once_s = 0.0

    def __init__(
        self, step: EagerStep, samples: int, hyper: dict[str, Tensor], *, whole: bool, update: UpdateStyle = "singly"
    ) -> None:
        self._step, self._hyper, self._whole = step, hyper, whole
        self._tracer = _Tracer(step, samples, whole, update)

    def trace_once(self, batch: Any) -> CapturedStep:
        """Raises PlanError if the step can't be captured."""
        began = time.perf_counter()
        _check_hooks(self._step, whole=self._whole)  # each time: callbacks may register hooks
        captured = self._tracer.trace((step_tensors(self._step, self._hyper, whole=self._whole), batch))
        self.once_s = time.perf_counter() - began
        return captured

    def trace_twice(self, batch: Any) -> CapturedStep:
        """Raises PlanError also if two traces differ."""
        return self.trace_again(self.trace_once(batch), batch)

    def trace_again(self, first: CapturedStep, batch: Any) -> CapturedStep:
        """Traces again; raises PlanError if the trace differs from `first`."""
        second = self.trace_once(batch)
        if first.graph.code != second.graph.code or not have_same_constants(first.graph, second.graph):
            raise capture_error("two runs of the step do different operations", "a step that is the same each time")
        return second


class _Tracer:
    def __init__(self, step: EagerStep, samples: int, whole: bool, update: UpdateStyle) -> None:
        self.step, self.samples, self.whole, self.update_style = step, samples, whole, update
        self.names = {id(value): name for name, value in step.parts.model.named_parameters()}
        self.numbers = scalars_by_place(step.optimizer)
        self.scalars: tuple[str, ...] = ()
        self.gradients: tuple[str, ...] = ()
        self.updates = False

    def trace(self, values: Any) -> CapturedStep:
        leaves, unflatten = flatten_tree(values)
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if others:
            raise capture_error(f"a batch holds {type(others[0]).__name__}", "batches of tensors alone")
        check_recurrent(self.step.parts.model, self.step.parts.device)
        # imports sympy, which takes a third of a second
        from hotloop.lowering.compile.symbolic_numbers import FastShapeEnv, skip_power_guards

        mode = FakeTensorMode(shape_env=FastShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
        # Each leaf is an input of its own, even if the batch contains one tensor twice.
        examples = [mode.from_tensor(_alias(leaf), static_shapes=True) for leaf in leaves]
        positions = _generator_positions()
        try:
            no_reset = refuse_rng_reset(self.step.parts.device)
            with silence_loggers("torch"), mode, trace_mode(), skip_power_guards(), no_reset:
                run = make_fx(lambda *flat: self.run(*unflatten(flat)), DECOMPOSITIONS)
                graph = run(*examples)
            fix_graph_for_inductor(graph)
        except PlanError:
            raise
        except Exception as error:
            raise self._refused(error) from error
        if positions != _generator_positions():
            raise capture_error(
                "the step draws from Python's or NumPy's generator", "draws from torch's generator alone"
            )
        check_draws(graph)
        self.check_generators(graph)
        check_constants(graph, leaves)
        check_overlaps(graph, tensors_by_place(values[0]))
        check_batch(graph, flatten_tree(values[1])[0])
        return CapturedStep(graph, examples, self.scalars, self.gradients)

    def check_generators(self, graph: GraphModule) -> None:
        """Refuses draws from generators other than torch's global ones: the seed of a step doesn't reach them."""
        generators = [value for value in graph_constants(graph).values() if isinstance(value, torch.Generator)]
        if generators:
            self.step.owned.of_batch.refresh()
            path = self.step.owned.of_batch.find_path(generators[0]) or "a torch.Generator"
            raise capture_error(
                f"the step draws from {path}, a random generator of its own",
                "draws from torch's global generator",
                fix="leave out generator=... there, or choose compile=none and graphs=none",
            )

    def run(self, values: StepTensors, batch: Any) -> tuple[Tensor, ...]:
        """Runs one step on the given tensors, in place of the step's own."""
        parts = self.step.parts
        is_trained = {name: value.requires_grad for name, value in parts.model.named_parameters(remove_duplicate=False)}
        live = {name: value.detach().requires_grad_(is_trained[name]) for name, value in values["parameters"].items()}
        buffers, scale = values["buffers"], values.get("scale")
        loss = parts.task.loss if isinstance(parts.task.loss, nn.Module) else nn.Module()
        wanted = {name: value for name, value in live.items() if value.requires_grad}
        gradients: dict[str, Tensor] = {}

        def backward(loss: Tensor, counts: Tensor | None = None) -> None:
            scaled = loss if scale is None else loss * scale
            computed = torch.autograd.grad(scaled, list(wanted.values()), allow_unused=True)
            for name, value in zip(wanted, unalias(computed, _storage_place), strict=True):
                if value is not None:
                    _check_dense(name, value)
                    value = value if counts is None else torch.where(counts, value, 0.0)
                    gradients[name] = gradients[name] + value if name in gradients else value

        with (
            torch.enable_grad(),
            # stack_weights: restores in reverse order, since a module with two names gets its parameters twice
            _reparametrize_module(parts.model, {**live, **buffers}, tie_weights=True, stack_weights=True),
            _reparametrize_module(loss, values["loss"], tie_weights=True, stack_weights=True),
            refuse_side_effects(parts.model, {"loss": parts.task.loss, "step": parts.task.step}),
        ):
            computed = self.compute(batch, backward)
        self.scalars = tuple(computed.scalars)
        outputs = (computed.loss.detach(), *(value.detach() for value in computed.scalars.values()))
        if not self.whole:
            self.gradients = tuple(gradients)
            return (*outputs, *gradients.values())
        self.updates = True
        with torch.no_grad():
            self.update(values, gradients)
        return outputs

    def _refused(self, error: Exception) -> PlanError:
        """Returns the error of a failed trace; compile=forward may still work if the update failed."""
        if not self.updates:
            return capture_error(describe_error(error), "tensor operations that don't read a tensor's value in Python")
        return capture_error(
            f"the optimizer, {type_name(self.step.optimizer)}: {describe_error(error)}",
            "an update of tensor operations that don't read a tensor's value in Python",
            "choose compile=forward, which leaves the update out, or compile=none; and graphs=none",
        )

    def compute(self, batch: Any, backward: Callable[..., None]) -> StepResult:
        """Runs forward and backward, in pieces with accumulation."""
        parts = self.step.parts
        if parts.plan.accumulation > 1:
            return accumulate_on_device(parts, parts.model, batch, self.samples, backward)
        computed = parts.compute(parts.model, batch)
        backward(computed.loss)
        return computed

    def update(self, values: StepTensors, gradients: dict[str, Tensor]) -> None:
        """Clips, runs the optimizer's `step` and updates the average, on the given tensors."""
        step, optimizer = self.step, self.step.optimizer
        parameters = values["parameters"]
        groups, state = [dict(group) for group in optimizer.param_groups], optimizer.state
        for name, value in gradients.items():
            parameters[name].grad = value
        try:
            swapped: Any = type(state)(dict)
            swapped.update({key: value for key, value in state.items() if not isinstance(key, Tensor)})
            for group in optimizer.param_groups:
                names = [self.names[id(parameter)] for parameter in group["params"]]
                for name, parameter in zip(names, group["params"], strict=True):
                    if parameter in state:
                        swapped[parameters[name]] = {**state[parameter], **values["state"].get(name, {})}
                group["params"] = [parameters[name] for name in names]
                if self.update_style != "as_set":
                    in_lists = self.update_style == "in_lists" and group.get("foreach") is not False
                    flags = {"foreach": in_lists, "fused": False}
                    group.update({key: flag for key, flag in flags.items() if key in group})
            optimizer.state = swapped
            for place, number in list(group_numbers(optimizer)):
                current = self.numbers[place]
                if place in values["hyper"]:
                    put_value(optimizer, place, _traced_number(optimizer, place, values["hyper"][place], current))
                elif isinstance(number, Tensor):
                    put_value(optimizer, place, current)
            step.clip([value for group in optimizer.param_groups for value in group["params"]])
            lay_out_gradients(optimizer)
            with refuse_update_side_effects(optimizer, {id(value): name for name, value in parameters.items()}):
                bare_step(type(optimizer).step)(optimizer)
            if self.step.parts.device.type == "cpu":
                zero_subnormals(value for state in values["state"].values() for value in state.values())
        finally:
            optimizer.state = state
            for group, original in zip(optimizer.param_groups, groups, strict=True):
                group.update(original)
            for value in parameters.values():
                value.grad = None
        if values["average"]:
            step.update_average(list(values["average"].values()), [parameters[name] for name in values["average"]])


def unalias(gradients: Iterable[Tensor | None], place: Callable[[Tensor], Any]) -> Iterator[Tensor | None]:
    """Yields gradients with separate memory, as autograd accumulates them: both terms of a sum get the same tensor.

    Args:
        place: identifies memory and offset of a tensor.
    """
    places = set[Any]()
    for value in gradients:
        if value is not None and value.layout == torch.strided:
            value = value.clone() if place(value) in places else value
            places.add(place(value))
        yield value


def _check_dense(name: str, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise capture_error(
            f"the gradient of {name!r} is sparse",
            "dense gradients",
            fix="leave out sparse=True of that layer, or choose compile=none and graphs=none",
        )


def _storage_place(value: Tensor) -> tuple[int, int]:
    return value.untyped_storage()._cdata, value.storage_offset()  # type: ignore[return-value]


def _alias(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _generator_positions() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["pos"], state["has_gauss"]


def _traced_number(optimizer: torch.optim.Optimizer, place: str, value: Tensor, current: float) -> Any:
    """Returns the traced value of one of the optimizer's numbers."""
    number, key, *_ = place.split("/")
    if optimizer.param_groups[int(number)].get("fused"):
        if key != "lr":
            raise capture_error(
                f"the schedule changes {key}, and a fused update takes the learning rate alone from the device",
                "a schedule of the learning rate, such as OneCycleLR(..., cycle_momentum=False)",
                fix="change the schedule, or choose optimizer=foreach",
            )
        return value.float()
    traced = value.item()
    if current:  # optimizers branch on it: an update without momentum has other operations
        torch._check(traced != 0)
    if current > 0:
        torch._check(traced > 0)
    return traced


def _check_hooks(step: EagerStep, *, whole: bool) -> None:
    """Refuses hooks: the graph has other tensors than the parameters, and the update of the optimizer's class alone."""
    if (name := first_hooked_parameter(step.parts.model)) is not None:
        raise capture_error(
            f"the parameter {name!r} has a hook on its gradient, which would not be called",
            "parameters without hooks of their own",
            fix="remove the hook, or choose compile=none and graphs=none",
        )
    if whole and (hook := describe_update_hook(step.optimizer)) is not None:
        raise capture_error(
            f"there is {hook}, which would not be called",
            "an optimizer whose class defines the whole update",
            fix="choose compile=forward, which leaves the update out, or compile=none; and graphs=none",
        )
