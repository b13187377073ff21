"""The engine axis: the step in array operations of `hotloop.arrays`, on the memory of torch's tensors.

NumPy or CuPy computes forward, loss, backward and update, without autograd. Random streams, clipping, schedule,
average, sums and State are the eager step's, so that training can continue under any plan.
"""

from __future__ import annotations

from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop.arrays.dense import Dropout, Embedding
from hotloop.arrays.layer import shape_after
from hotloop.arrays.optimizers import Memory, Optimizer
from hotloop.core.task_parts.models import modules_in_eval
from hotloop.errors import DataError, PlanError, TaskError, type_name
from hotloop.lowering.arrays_engine.conversion import (
    as_array,
    convert_loss,
    convert_model,
    convert_optimizer,
    has_step_count,
    namespace_of,
)
from hotloop.lowering.arrays_engine.graph_trace import module_label, unsupported_error
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.transforms.optimizer import describe_update_hook
from hotloop.task import StepResult


class ArraysStep(EagerStep):
    """One training step in array operations.

    Attributes:
        network: the model's layers.

    Raises:
        PlanError: the Task has a part without counterpart in arrays; the message names it.
    """

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        if parts.task.step is not None:
            raise PlanError(
                "engine=arrays, and the Task has a step of its own",
                expected="a model and a loss, which engine=arrays can compute",
                fix="use engine=eager",
            )
        if parts.in_eval:
            name = min(parts.in_eval)
            raise unsupported_error(
                f"{module_label(name, parts.model.get_submodule(name))}, which stays in evaluation mode while training"
            )
        self._xp = namespace_of(parts.device)
        self.network = convert_model(parts.model, self._xp)
        self._loss = convert_loss(parts.task.loss)
        if (found := describe_update_hook(self.optimizer)) is not None:
            raise unsupported_error(found)
        for group in self.optimizer.param_groups:
            convert_optimizer(self.optimizer, group)
        layers = [call.layer for call in self.network.calls]
        for layer in layers:
            if isinstance(layer, Dropout):
                layer.draw = self._draw_mask
        self._embeddings = [layer for layer in layers if isinstance(layer, Embedding)]
        self._addresses, self._trained = self._find_addresses(), self._find_trained()
        self._gradients: dict[Tensor, Any] = {}
        # torch's schedulers warn if the optimizer's own `step` wasn't called before theirs.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._memory: dict[Tensor, Memory] = {}
        self._dtype = self._trainable[0].dtype
        self._known_inputs: Any = None
        self._uses_arrays = True

    def run_eagerly(self) -> None:
        """Makes torch run further steps on the same tensors, so that hooks of modules are called."""
        self._uses_arrays = False

    def on_state_restored(self) -> None:
        """Drops the views of the optimizer's state, whose tensors were replaced."""
        self._memory = {}

    def invalidate_bindings(self) -> None:
        """Checks that the layers still compute on the model's memory, which callbacks may have replaced.

        Raises:
            TaskError: the model has other parameters than the optimizer, other memory, or other trainable parameters.
        """
        super().invalidate_bindings()
        self._check_ownership()
        self._memory = {}
        places = self._find_addresses()
        if moved := [name for name, place in places.items() if place != self._addresses.get(name)]:
            raise TaskError(
                f"a callback gives {moved[0]!r} other memory, and engine=arrays computes on the former memory",
                expected="parameters and buffers that are changed in place",
                fix=f"write into {moved[0]!r}, such as by `.data.copy_(...)`, or choose engine=eager",
            )

        if in_eval := modules_in_eval(self.parts.model):
            raise TaskError(
                f"a callback puts {min(in_eval)!r} into evaluation mode, and engine=arrays trains all modules",
                expected="modules that stay in training mode",
                fix="choose engine=eager",
            )
        if changed := sorted(self._find_trained() ^ self._trained):
            raise TaskError(
                f"a callback freezes or thaws {changed[0]!r}, and engine=arrays trains the parameters that were trainable at first",
                expected="the same parameters to train throughout",
                fix="choose engine=eager",
            )

    def _find_trained(self) -> set[str]:
        return {name for name, value in self.parts.model.named_parameters() if value.requires_grad}

    def _find_addresses(self) -> dict[str, int]:
        model = self.parts.model
        return {name: value.data_ptr() for name, value in chain(model.named_parameters(), model.named_buffers())}

    def _backward(self, batch: Any, samples: int, step: int) -> StepResult:
        if not self._uses_arrays:
            return super()._backward(batch, samples, step)
        self.draws.seed(step)
        self._clear_gradients()
        with np.errstate(all="ignore"):  # as in torch, the training loop checks for infinity
            loss = self._forward_and_backward(*self._arrays(batch))
        for parameter, users in self.network.owned_modules:
            self._gradients[parameter] = reduce(add, [layer.gradients[name] for layer, name in users])
            parameter.grad = torch.as_tensor(self._gradients[parameter])
        self._clip_unscaled()
        return StepResult(torch.as_tensor(loss), None, {})

    def _forward_and_backward(self, inputs: Any, target: Any) -> Any:
        output = self.network.graph.forward(inputs, training=True)
        loss, gradient = self._differentiate_loss(output, target)
        self.network.graph.backward(gradient)
        return loss

    def _differentiate_loss(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Returns the loss and its derivative by the output; a method of its own, which the profiler times."""
        self._loss.check(target, output.shape[1:], "the target")
        return self._loss.forward(output, target), self._loss.backward()

    def _update(self) -> None:
        if not self._uses_arrays:
            super()._update()
            return
        weights = {parameter: users[0][0].weights[users[0][1]] for parameter, users in self.network.owned_modules}
        counting = has_step_count(self.optimizer)
        for group in self.optimizer.param_groups:
            rule = convert_optimizer(self.optimizer, group)
            for parameter in group["params"]:
                if parameter in weights:  # others are frozen
                    self._update_by(rule, parameter, weights[parameter], counting)

    def _update_by(self, rule: Optimizer, parameter: Tensor, weight: Any, counting: bool) -> None:
        state = self._state(parameter, rule.remembers, counting)
        if counting:
            state["step"] += 1
        step = int(state["step"]) if counting else 0
        with np.errstate(all="ignore"):
            rule.update(weight, self._gradients[parameter], self._memory[parameter], step)

    def _state(self, parameter: Tensor, names: tuple[str, ...], counting: bool) -> dict[str, Any]:
        """Returns a parameter's optimizer state, made as by its first step; the arrays are on the same memory."""
        state = self.optimizer.state[parameter] if names or counting else {}
        if parameter in self._memory:
            return state
        for name in names:
            state.setdefault(name, torch.zeros_like(parameter, requires_grad=False))
        if counting:
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        self._memory[parameter] = {name: as_array(state[name], self._xp) for name in names}
        return state

    def _draw_mask(self, shape: tuple[int, ...], share: float) -> Any:
        """Draws a dropout's mask from torch's generator, as torch's own dropout."""
        mask = torch.empty(shape, dtype=self._dtype, device=self.parts.device).bernoulli_(share)
        return as_array(mask, self._xp)

    def _arrays(self, batch: Any) -> tuple[Any, Any]:
        """Returns inputs and target as arrays.

        Raises:
            DataError: the batch is no pair of tensors, or has a dtype other than the model's.
            TaskError: the model doesn't accept the inputs.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(one, Tensor) for one in batch):
            given = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type_name(batch)
            raise DataError(
                f"engine=arrays, and a batch is {given}",
                expected="one tensor of inputs and one of targets",
                fix="use engine=eager",
            )
        inputs, target = batch
        if (inputs.shape[1:], inputs.dtype) != self._known_inputs:
            self._check_inputs(inputs)
        for embedding in self._embeddings:
            embedding.check(as_array(inputs, self._xp), "the batch")
        target = target.to(self._dtype) if target.is_floating_point() else target
        return as_array(inputs, self._xp), as_array(target, self._xp)

    def _check_inputs(self, inputs: Tensor) -> None:
        embeds = bool(self._embeddings)
        if inputs.is_floating_point() == embeds or (not embeds and inputs.dtype != self._dtype):
            raise DataError(
                f"the inputs have dtype {_shorten(inputs.dtype)}",
                expected="whole numbers, for the embedding" if embeds else f"{_shorten(self._dtype)}, as the model has",
                fix="turn them into that, in the data or in the Task's prepare",
            )
        shape_after(self.network.graph, tuple(inputs.shape[1:]))
        self._known_inputs = (inputs.shape[1:], inputs.dtype)


def _shorten(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
