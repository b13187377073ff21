"""Traces one training step: on fake tensors, which have no memory, or on real tensors where fake ones don't suffice.

Two steps run. The first creates the optimizer's state; the second, in which the memory is that of all later steps, is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.step_costs import OperatorCost, StepCosts
from hotloop.core.task_parts.losses import YieldedLosses
from hotloop.core.task_parts.models import copy_model
from hotloop.core.task_parts.optimizers import NamedOptimizers
from hotloop.errors import HotloopError, TaskError, describe_error
from hotloop.lowering.eager_step import needs_closure
from hotloop.plan import Plan
from hotloop.profiler.step_costs.compiled_memory import compiled_activation_share
from hotloop.profiler.step_costs.device_operators import choose_implementation, operators_of
from hotloop.profiler.step_costs.fake_parts import batch_bytes, counted_modules, fake_model, resize_batch
from hotloop.profiler.step_costs.operator_recorder import StepRecorder, parameter_elements
from hotloop.profiler.step_costs.step_parts import StepParts
from hotloop.task import Parameters, Task

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_UPDATE_FLOPS = 12  # per parameter, of an update that can't be traced, as of Adam
_PIECES_TRACED = 2  # of an accumulated batch: in the second, gradients exist


def trace_step(
    subject: Task | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[Parameters], Optimizer] | None = None,
    plan: Plan | None = None,
    batch_size: int | None = None,
    device: str = "cpu",
    is_training: bool = True,
) -> StepCosts:
    """Returns the costs of one training step.

    Args:
        subject: a Task; or a module or a factory of one, with example inputs.
        inputs: of a module: a tensor, a tuple of positional arguments or a dict of keyword arguments; with `loss`, the
            last of a tuple is the target. Values aren't read, shapes and dtypes are.
        loss: `loss(output, target)`; without it the output's `loss`, else the mean of the output.
        optimizer: a factory, as in a Task; default Adam.
        plan: the axes `precision`, `accumulation`, `compile` and `optimizer` count. A compiled plan's operators are
            those of the eager step; the memory is an estimate.
        batch_size: rows; default the Task's, or those of the inputs.
        device: kind of the device that the step is for: `cpu`, or `cuda`, where optimizers update lists of parameters and
            dropout is one kernel.
        is_training: whether backward and update follow the forward pass; of modules.

    Raises:
        HotloopError: the step fails on fake tensors, and on real ones, or free memory is too small for real ones.
    """
    plan = plan or Plan()
    if isinstance(subject, Task):
        rows: int | None = batch_size or subject.roles.batch_size
        parts = StepParts.from_task(subject, rows or 1)
    else:
        if inputs is None:
            raise TaskError("a model without inputs", expected="an example batch", fix="give inputs=")
        rows, parts = batch_size, StepParts.from_model(subject, inputs, loss, optimizer, is_training)
    with preserve_generators():
        try:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            return _Trace(parts, plan, rows, device, mode).run()
        except HotloopError:
            raise
        except Exception as error:
            return _trace_in_memory(parts, plan, rows, device, error)


def _trace_in_memory(parts: StepParts, plan: Plan, rows: int | None, device: str, error: Exception) -> StepCosts:
    """Traces a real step, where a step on fake tensors fails with `error`."""
    reason = describe_error(error)
    model = parts.model if isinstance(parts.model, nn.Module) else None
    known = sum(value.numel() * value.element_size() for value in model.parameters()) if model is not None else 0
    if 4 * known > free_memory_bytes(torch.device("cpu")):
        raise TaskError(
            f"the step can't be traced without memory ({reason}), and is too large to run here",
            expected="a step that doesn't read tensors' values",
            fix="try a smaller batch, or a machine with more memory",
        ) from None
    try:
        costs = _Trace(parts, plan, rows, device, None).run()
    except HotloopError:
        raise
    except Exception as real:
        raise TaskError(
            f"the step fails: {describe_error(real)}", expected="a step that runs on the example batch"
        ) from real
    return replace(costs, notes=(*costs.notes, f"a real step was recorded, because it fails without memory: {reason}"))


class _Trace:
    def __init__(
        self, parts: StepParts, plan: Plan, rows: int | None, device: str, mode: FakeTensorMode | None
    ) -> None:
        self.parts, self.plan, self.mode = parts, plan, mode
        self.recorder = StepRecorder(device)
        self.pieces = max(plan.accumulation, 1)
        if self.pieces > 1 and rows is None:
            rows = resize_batch(parts.batch, None, mode)[1]
        piece_rows = -(-rows // self.pieces) if rows else None
        self.batch, self.piece_rows = resize_batch(parts.batch, piece_rows, mode)
        self.rows = rows or self.piece_rows
        self.module_calls = self.autograd_nodes = 0
        self.saved_bytes = 0
        self.average: list[Tensor] = []

    def run(self) -> StepCosts:
        recorder, model = self.recorder, self._build_model()
        with self._fakes():
            model.train(self.parts.optimizer is not None)
            optimizer = None if self.parts.optimizer is None else self._build_optimizer(model)
            with recorder, operators_of(recorder.device), counted_modules(model) as calls:
                state = [*model.parameters(), *model.buffers()]
                base = recorder.add_tensors(state)
                inputs = self._add_inputs()
                if optimizer is None:
                    with torch.no_grad():
                        self._forward_only(model, calls)
                else:
                    self.average = self._average_of(model)
                    self._step(model, optimizer)
                    recorder.is_recording, calls[0] = True, 0
                    recorder.reset_peaks()
                    self._step(model, optimizer)
                    self.module_calls = calls[0] * self.pieces // min(self.pieces, _PIECES_TRACED)
        return self._costs(model, optimizer, base, inputs)

    def _fakes(self) -> Any:
        return self.mode if self.mode is not None else nullcontext()

    def _add_inputs(self) -> int:
        """Counts the whole batch, of which a piece is computed."""
        self.recorder.add_tensors(leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor))
        piece = batch_bytes(self.batch)
        whole = piece * self.rows // max(self.piece_rows, 1)
        self.recorder.live_bytes += whole - piece
        return whole

    def _build_model(self) -> nn.Module:
        given = self.parts.model
        if self.mode is not None:
            return fake_model(given, self.mode, self.recorder.notes)
        return copy_model(given) if isinstance(given, nn.Module) else given()

    def _build_optimizer(self, model: nn.Module) -> Optimizer:
        if any(isinstance(value, nn.parameter.UninitializedParameter) for value in model.parameters()):
            with torch.no_grad():
                self.parts.compute(model, self.batch)
        assert self.parts.optimizer is not None
        optimizer = self.parts.optimizer(model)
        for group in optimizer.param_groups:
            choose_implementation(group, self.plan.optimizer, self.recorder.device)
        return optimizer

    def _average_of(self, model: nn.Module) -> list[Tensor]:
        if self.parts.average is None:
            return []
        return [value.detach().clone() for value in model.parameters() if value.requires_grad]

    def _forward_only(self, model: nn.Module, calls: list[int]) -> None:
        self.recorder.is_recording = True
        with self._autocast():
            self.parts.compute(model, self.batch)
        self.module_calls = calls[0]

    def _autocast(self) -> Any:
        dtype = _HALF.get(self.plan.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def _step(self, model: nn.Module, optimizer: Optimizer) -> None:
        for value in model.parameters():
            value.grad = None
        if needs_closure(optimizer):
            self._update(model, optimizer, lambda: self._pieces(model, optimizer))
            return
        if self._pieces(model, optimizer) is not None:
            self._update(model, optimizer, None)
        if self.average:
            with torch.no_grad():
                self.recorder.phase = "update"
                trained: list[Tensor] = [value for value in model.parameters() if value.requires_grad]
                torch._foreach_lerp_(self.average, trained, 0.1)
                self.recorder.phase = "forward"

    def _pieces(self, model: nn.Module, optimizer: Optimizer) -> Any:
        """Runs forward and backward of each piece of the batch; returns None if the updates were run as well."""
        loss = None
        traced = min(self.pieces, _PIECES_TRACED)
        for piece in range(traced):
            self.recorder.weight = 1 if piece < traced - 1 else self.pieces - traced + 1
            before = self.recorder.live_bytes
            with self._autocast():
                result = self.parts.compute(model, self.batch)
                if isinstance(result, Generator):
                    self._alternate(model, optimizer, result)
                    return None
            loss = result
            self.saved_bytes = self.recorder.live_bytes - before
            del result
            self._backward(loss)
            loss = loss.detach()
        self.recorder.weight = 1
        return loss

    def _alternate(self, model: nn.Module, optimizer: Optimizer, losses: Generator[Any, Any, Any]) -> None:
        """Updates one optimizer's parameters after each loss that the step yields."""
        members = optimizer.members if isinstance(optimizer, NamedOptimizers) else {}
        for turn in YieldedLosses(losses):
            own = [value for group in members[turn.name].param_groups for value in group["params"]]
            gradients = torch.autograd.grad(turn.loss, own, retain_graph=True, allow_unused=True)
            for value, gradient in zip(own, gradients, strict=True):
                value.grad = gradient
            del gradients
            self._update(model, members[turn.name], None)

    def _backward(self, loss: Tensor) -> None:
        self.autograd_nodes = count_nodes(loss) * self.pieces
        self.recorder.phase = "backward"
        try:
            loss.backward()
        finally:
            self.recorder.phase = "forward"

    def _update(self, model: nn.Module, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        trained = [value for value in model.parameters() if value.requires_grad]
        self.recorder.phase = "update" if closure is None else "forward"
        try:
            if self.parts.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained, self.parts.clip_norm)
            if self.parts.clip_value is not None:
                nn.utils.clip_grad_value_(trained, self.parts.clip_value)
            optimizer.step(closure)
        except Exception as error:  # an optimizer is user code: it may read a number that a fake tensor lacks
            if self.mode is None:
                raise
            self._count_update(optimizer, error)
        finally:
            self.recorder.phase = "forward"

    def _count_update(self, optimizer: Optimizer, error: Exception) -> None:
        """Counts an update that can't be traced by formula."""
        kind = type(optimizer).__name__
        self.recorder.notes[f"the update of {kind} is counted as Adam's ({describe_error(error)})"] = None
        if not self.recorder.is_recording:
            return
        trained = [value for group in optimizer.param_groups for value in group["params"]]
        elements = parameter_elements(trained)
        item = trained[0].element_size() if trained else 4
        cost = OperatorCost(
            f"update.{kind}",
            "update",
            "update",
            _UPDATE_FLOPS * elements,
            4 * elements * item,
            3 * elements * item,
            (elements,),
            launches=max(len(trained) // 30, 1),
            tensors=4 * len(trained),
        )
        self.recorder.calls[cost] = 1

    def _costs(self, model: nn.Module, optimizer: Optimizer | None, base: int, inputs: int) -> StepCosts:
        recorder = self.recorder
        is_compiled = self.plan.compile not in ("none", None) and optimizer is not None
        if is_compiled:
            recorder.notes["the memory of a compiled plan is an estimate from the eager step's"] = None
        return costs_of_recorded_step(
            recorder,
            rows=self.rows,
            parameters=list(model.parameters()),
            buffers=list(model.buffers()),
            state=[*([] if optimizer is None else state_tensors(optimizer)), *self.average],
            base=base,
            inputs=inputs,
            saved_bytes=self.saved_bytes,
            module_calls=self.module_calls,
            autograd_nodes=self.autograd_nodes,
            activation_share=compiled_activation_share(recorder.operators) if is_compiled else 1.0,
        )


def costs_of_recorded_step(
    recorder: StepRecorder,
    *,
    rows: int,
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    state: Sequence[Tensor],
    base: int,
    inputs: int,
    saved_bytes: int,
    module_calls: int,
    autograd_nodes: int,
    activation_share: float = 1.0,
) -> StepCosts:
    """Returns the costs of the step that `recorder` has seen.

    Args:
        state: of the optimizer.
        base, inputs: bytes of parameters and buffers, and of the batch.
        activation_share: of the recorded activations that remain in memory.
    """
    peaks = recorder.peaks
    gradients = [value.grad for value in parameters if value.grad is not None]
    optimizer_bytes = _bytes_of(state)
    fixed = base + optimizer_bytes + inputs
    activations = int(activation_share * max(max(peaks["forward"], peaks["backward"]) - fixed, 0))
    passes = fixed + activations
    return StepCosts(
        operators=recorder.operators,
        batch_size=rows,
        parameters=parameter_elements(parameters),
        parameter_bytes=_bytes_of(parameters),
        buffer_bytes=_bytes_of(buffers),
        gradient_bytes=_bytes_of(gradients),
        optimizer_bytes=optimizer_bytes,
        input_bytes=inputs,
        activation_peak_bytes=activations,
        peak_bytes=max(passes, peaks["update"]),
        forward_peak_bytes=min(peaks["forward"], passes),
        backward_peak_bytes=min(peaks["backward"], passes),
        update_peak_bytes=peaks["update"],
        saved_bytes=max(saved_bytes, 0),
        largest_bytes=recorder.largest_bytes,
        module_calls=module_calls,
        autograd_nodes=autograd_nodes,
        parameter_tensors=sum(value.requires_grad for value in parameters),
        notes=tuple(recorder.notes),
    )


def count_nodes(loss: Tensor) -> int:
    """Returns the number of nodes of the backward graph."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
    return len(seen)


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for value in optimizer.state.values():
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, shared ones once."""
    return sum(value.numel() * value.element_size() for value in {id(value): value for value in tensors}.values())
