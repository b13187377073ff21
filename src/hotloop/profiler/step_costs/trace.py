"""Traces one training step: on fake tensors, which have no memory, or on real tensors where fake ones don't suffice.

Two steps run. The first creates the optimizer's state; the second, in which the memory is that of all later steps, is
recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.step_costs import OperatorCost, StepCosts
from hotloop.core.task_parts.losses import YieldedLosses
from hotloop.core.task_parts.models import copy_model, default_device, restart_names
from hotloop.core.task_parts.optimizers import NamedOptimizers
from hotloop.core.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.data.row_count import count_rows
from hotloop.errors import HotloopError, InsufficientMemoryError, TaskError, call_user_code, describe_error, type_name
from hotloop.lowering.eager_step import needs_closure
from hotloop.plan import Plan
from hotloop.profiler.step_costs.operator_recorder import StepRecorder, parameter_elements
from hotloop.task import Parameters, Task

_LARGEST_SAMPLE = 32  # rows of the data that are read for the shapes of a batch

Compute = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class StepParts:
    """The parts of a step before any tensor exists.

    Attributes:
        model: a module or a factory.
        compute: `compute(model, batch)` returns the loss, or a generator of (optimizer's name, loss).
        optimizer: a factory; None for inference without backward and update.
        batch: an example with at least one row.
        clip_norm, clip_value, average: as in a Task.
    """

    model: nn.Module | Callable[[], nn.Module]
    compute: Compute
    optimizer: Callable[[nn.Module], Optimizer] | None
    batch: Any
    clip_norm: float | None = None
    clip_value: float | None = None
    average: float | None = None

    @classmethod
    def from_task(cls, task: Task, batch_size: int) -> StepParts:
        def model() -> nn.Module:
            restart_names()
            return task.model() if not isinstance(task.model, nn.Module) else copy_model(task.model)

        batch = first_batch(task.roles, min(batch_size, _LARGEST_SAMPLE))
        given = task.model if isinstance(task.model, nn.Module) else model
        further = (task.clip_norm, task.clip_value, task.average)
        return cls(given, lambda model, batch: _loss_of_task(task, model, batch), task.build_optimizer, batch, *further)

    @classmethod
    def from_model(
        cls, model: Any, inputs: Any, loss: Callable[[Any, Any], Tensor] | None, optimizer: Any, is_training: bool
    ) -> StepParts:
        def compute(model: nn.Module, batch: Any) -> Tensor:
            if loss is not None:
                *arguments, target = batch
                return loss(_call(model, tuple(arguments)), target)
            return _default_loss(_call(model, batch))

        def build(model: nn.Module) -> Optimizer:
            return (optimizer or torch.optim.Adam)(Parameters(model))

        return cls(model, compute, build if is_training else None, inputs)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _loss_of_task(task: Task, model: nn.Module, batch: Any) -> Any:
    """Returns the loss, or the generator of losses of a step with several optimizers."""
    if task.step is None:
        return task.compute(model, batch).loss
    with default_device(model):
        result = task.step(model, batch)
    return result["loss"] if isinstance(result, Mapping) else result


def _default_loss(output: Any) -> Tensor:
    """Returns the output's own loss, or the sum of the means of its floating tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    means = [leaf.mean() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not means and torch.is_grad_enabled():
        raise TaskError(
            "the model's output has no tensor with a gradient", expected="one or more", fix="give loss=(output, target)"
        )
    return sum(means[1:], start=means[0]) if means else torch.zeros(())


_FUSED = ("elementwise", "copy", "random")


def compiled_activation_share(operators: Iterable[OperatorCost]) -> float:
    """Returns the share of the eager step's activations that a compiled step has at its peak.

    The compiler fuses elementwise operators into their neighbours and computes cheap results again in the backward
    pass, so that their results aren't saved: about the half of them, since one of two is an input of a product.
    """
    forward = [one for one in operators if one.phase == "forward"]
    written = sum(one.written_bytes * one.count for one in forward)
    fused = sum(one.written_bytes * one.count for one in forward if one.kind in _FUSED)
    return 1.0 - 0.5 * fused / written if written else 1.0


class _GpuOperators(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return input
        return torch.native_dropout(input, p, True)[0]


def operators_of(device: str) -> AbstractContextManager[Any]:
    """Returns a context in which a trace on the CPU takes the operators of a kind of device."""
    return nullcontext() if device == "cpu" else _GpuOperators()


def choose_implementation(group: dict[str, Any], asked: str, device: str) -> None:
    """Sets how an optimizer's parameter group is updated, by the plan's axis `optimizer` and the device's default."""
    if asked != "default":
        for name, key in (("foreach", "foreach"), ("fused", "fused")):
            if key in group:
                group[key] = asked == name
    elif device != "cpu" and group.get("foreach", True) is None and not group.get("fused"):
        group["foreach"] = True


_SHARE = 0.7  # of the free memory that a real construction may take


def fake_model(model: nn.Module | Callable[[], nn.Module], mode: FakeTensorMode, notes: dict[str, None]) -> nn.Module:
    """Returns the model with fake parameters and buffers.

    A factory runs under the fake mode. If the factory reads values, the model is built in memory first.

    Raises:
        InsufficientMemoryError: the model must be built in memory, and free memory is too small.
    """
    if isinstance(model, nn.Module):
        return _fake_copy(model, mode)
    try:
        with mode:
            made = model()
    except Exception as error:
        try:
            with _MemoryLimit(int(_SHARE * free_memory_bytes(torch.device("cpu")))):
                made = call_user_code("the model factory", model)
        except _TooLarge:
            raise InsufficientMemoryError(
                f"the model can't be traced without memory ({describe_error(error)}), and is too large to be built here",
                expected="a factory that doesn't read tensors' values",
                fix="build the layers from shapes alone, or run on a machine with more memory",
            ) from None
        notes["the model was built in memory, because its factory reads values"] = None
    if not isinstance(made, nn.Module):
        raise TaskError(f"the model factory returned {type_name(made)}", expected="a torch.nn.Module")
    return made if _is_fake(made) else _fake_copy(made, mode)


def _is_fake(model: nn.Module) -> bool:
    return all(isinstance(value, FakeTensor) for value in [*model.parameters(), *model.buffers()])


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Returns a copy that shares no memory: each parameter and buffer becomes one fake tensor, shared as before."""
    memo: dict[int, Any] = {}
    for value in [*model.parameters(), *model.buffers()]:
        if isinstance(value, FakeTensor):
            continue
        fake = mode.from_tensor(value.detach())
        memo[id(value)] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


class _TooLarge(Exception):
    pass


class _MemoryLimit(TorchDispatchMode):
    """Stops a construction whose new tensors exceed a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.left = most_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("empty", "empty_strided", "zeros", "ones", "randn", "rand", "full"):
            sizes = args[0] if args and isinstance(args[0], list | tuple) else [0]
            dtype = (kwargs or {}).get("dtype") or torch.get_default_dtype()
            self.left -= torch.Size(sizes).numel() * dtype.itemsize
            if self.left < 0:
                raise _TooLarge
        return func(*args, **(kwargs or {}))


def resize_batch(batch: Any, rows: int | None, mode: FakeTensorMode | None) -> tuple[Any, int]:
    """Returns the batch with `rows` rows, of fake tensors under a mode, and the number of its rows."""
    present = count_rows(batch).number
    rows = rows or present

    def resize(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == present
        shape = (rows, *tensor.shape[1:]) if has_rows else tuple(tensor.shape)
        if mode is None:
            wanted = torch.arange(shape[0], device=tensor.device) % present if has_rows and rows != present else None
            return tensor.clone() if wanted is None else tensor[wanted]
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    return map_tensors(resize, batch), rows


def batch_bytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_tensors(batch))


@contextmanager
def counted_modules(model: nn.Module) -> Iterator[list[int]]:
    """Yields a list whose first item is the number of module calls so far."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handles = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


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
        with nullcontext() if self.mode is None else self.mode:
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
