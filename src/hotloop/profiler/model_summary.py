"""Summarizes a Task's model: one eager training step on the CPU, observed module by module."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.model_summary import ModelLayers, ModelMemory, ModuleRow
from hotloop.core.state import tree_leaves as named_leaves
from hotloop.core.task_parts.optimizers import describe_optimizer
from hotloop.core.torch_private import ReadOnlyDispatchMode, current_graph_task_id, tree_leaves
from hotloop.data.batch_tree import batch_inputs, tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.errors import call_user_code
from hotloop.lowering.build import lower
from hotloop.lowering.context import count_parameters
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.profiler.operator_cost import PRODUCT_FORMULAS, count_operator
from hotloop.profiler.step_costs.operator_recorder import op_call
from hotloop.report.model_summary import PrintableSummary
from hotloop.task import Task


def summarize_model(task: Task, batch_size: int | None = None) -> PrintableSummary:
    """Runs one training step of a Task's new model under the baseline on the CPU, and returns its summary.

    Args:
        batch_size: samples in the batch; default the Task's.

    Raises:
        TaskError, DataError: the Task can't be trained.
    """
    batch = first_batch(task.roles, batch_size or task.roles.batch_size)
    with closing(lower(task, Plan(device="cpu"))) as program:
        observer = _StepObserver(program.model, batch)
        with observer.observe():
            call_user_code("a training step", program.step, batch)
        return _summary(task, program, observer, batch)


_LAYERS_SAMPLES = 2

_MAX_LAYERS_PARAMETERS = 100_000_000
"""Larger models aren't copied for their layers."""


def model_layers(task: Task, model: nn.Module) -> ModelLayers | None:
    """Returns the layers of a model from a forward pass of a copy with two samples; None for models that are too large.

    The pass costs less than a training step. The model and all generators keep their states.
    """
    if count_parameters(model)[0] > _MAX_LAYERS_PARAMETERS:
        return None
    with preserve_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if task.loss is None:
                raise TypeError("the Task has a step of its own")
            copied = copy.deepcopy(model).cpu().eval()
            inputs = batch_inputs(first_batch(task.roles, _LAYERS_SAMPLES))
            observer = _StepObserver(copied, inputs)
            with observer.observe():
                copied(*inputs) if isinstance(inputs, tuple) else copied(inputs)
            return ModelLayers(samples=_LAYERS_SAMPLES, rows=list(_rows(copied, observer)), notes=observer.notes)
        except Exception as error:  # missing figures are no reason to end a training
            note = f"shapes and FLOPs are missing, since a copy can't be called ({type(error).__name__})"
        rows = [row.model_copy(update={"notes": []}) for row in _rows(model, _StepObserver(model, ()))]
        return ModelLayers(samples=_LAYERS_SAMPLES, rows=rows, notes=[note])


def _summary(task: Task, program: Program, observer: _StepObserver, batch: Any) -> PrintableSummary:
    model = program.model
    parameters, trainable = count_parameters(model)
    buffers = list(model.buffers())
    reached = [value for value in model.parameters() if id(value) in observer.reached]
    state = [value for _, value in named_leaves(program.optimizer_state()) if isinstance(value, Tensor)]
    memory = ModelMemory(
        parameters=_bytes(model.parameters()),
        buffers=_bytes(buffers),
        gradients=_bytes(reached),
        optimizer_state=_bytes(state),
        average=_bytes(program.average.values()),
        activations=observer.saved.peak_bytes,
        batch=_bytes(tree_tensors(batch)),
    )
    return PrintableSummary(
        task=task.name,
        batch=["x".join(map(str, tensor.shape)) for tensor in tree_tensors(batch)],
        rows=list(_rows(model, observer)),
        parameters=parameters,
        trainable=trainable,
        frozen=parameters - trainable,
        buffers=sum(value.numel() for value in buffers),
        forward_flops=observer.flops.forward,
        backward_flops=observer.flops.backward,
        memory=memory,
        optimizer=describe_optimizer(program.optimizer),
        notes=observer.notes,
    )


def _rows(model: nn.Module, observer: _StepObserver) -> Iterator[ModuleRow]:
    first_names: dict[int, str] = {}
    first_owners: dict[int, str] = {}
    repeated = ""
    for name, module in model.named_modules(remove_duplicate=False):
        if repeated and name.startswith(repeated):
            continue  # a shared module's submodules are listed at its first place
        row = ModuleRow(name=name, kind=type(module).__name__, depth=name.count(".") + 1 if name else 0)
        if id(module) in first_names:
            repeated = f"{name}."
            yield row.model_copy(update={"shared_with": first_names[id(module)] or "the model"})
            continue
        first_names[id(module)] = name
        owned, notes = list[nn.Parameter](), list[str]()
        for key, value in module.named_parameters(recurse=False):
            owner = first_owners.setdefault(id(value), f"{name}.{key}".removeprefix("."))
            if owner == f"{name}.{key}".removeprefix("."):
                owned.append(value)
            else:
                notes.append(f"{key} is {owner}")
        seen = observer.modules[id(module)]
        if not any(observer.modules[id(inner)].calls for inner in module.modules()):
            is_used = any(id(value) in observer.reached for value in module.parameters())
            notes.append("not called, but its parameters are used" if is_used else "not called")
        yield row.model_copy(
            update={
                "output": seen.output,
                "calls": seen.calls,
                "parameters": sum(value.numel() for value in owned),
                "trainable": sum(value.numel() for value in owned if value.requires_grad),
                "flops": seen.flops,
                "activations": seen.activations,
                "notes": notes,
            }
        )


def _bytes(tensors: Any) -> int:
    """Returns the bytes of tensors, each storage counted once."""
    return sum({id(value): value.numel() * value.element_size() for value in tensors}.values())


@dataclass
class _ModuleCalls:
    """What one module did in the step: FLOPs and saved bytes are without its submodules."""

    calls: int = 0
    output: list[list[int]] = field(default_factory=list)
    flops: float = 0.0
    activations: int = 0


class _StepObserver:
    """Observes one training step of a model: calls of modules, FLOPs, tensors saved for the backward pass, gradients.

    Attributes:
        modules: by the module's `id`.
        reached: `id`s of the parameters that received a gradient.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.modules = {id(module): _ModuleCalls() for module in model.modules()}
        self.reached: set[int] = set()
        self.notes: list[str] = []
        self._model = model
        self._stack: list[_ModuleCalls] = []
        self.flops = _FlopCounter(lambda: self._stack)
        known = [*model.parameters(), *model.buffers(), *tree_tensors(batch)]
        self.saved = _SavedTensors({_storage(value) for value in known}, lambda: self._stack)

    @contextmanager
    def observe(self) -> Iterator[None]:
        scripted = [name for name, module in self._model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if scripted:
            self.notes.append(f"calls of scripted modules can't be observed: {', '.join(scripted)}")
        with ExitStack() as stack:
            for module in self._model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.callback(module.register_forward_pre_hook(self._enter).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for value in self._model.parameters():
                if value.requires_grad:
                    stack.callback(value.register_hook(partial(self._note_gradient, id(value))).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.saved.pack, _SavedTensors.unpack))
            stack.enter_context(self.flops)
            yield

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._stack.append(self.modules[id(module)])

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        seen = self._stack.pop()
        if _is_in_backward():  # activation checkpointing computes the module again
            return
        seen.calls += 1
        if not seen.output:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            floating = [tensor for tensor in tensors if tensor.is_floating_point()]  # no indices of a packed sequence
            seen.output = [list(tensor.shape) for tensor in floating or tensors]

    def _note_gradient(self, key: int, gradient: Tensor) -> None:
        self.reached.add(key)


class _FlopCounter(ReadOnlyDispatchMode):
    """Counts the FLOPs of products: those of the forward pass by module, and those of the backward pass."""

    def __init__(self, stack: Callable[[], list[_ModuleCalls]]) -> None:
        super().__init__()
        self.forward = self.backward = 0.0
        self._stack = stack

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__ if hasattr(function, "overloadpacket") else ""
        if name in PRODUCT_FORMULAS:
            call = op_call(args)
            if name == "convolution_backward":  # the bias's gradient is a sum, not a product
                call = replace(call, arguments=[*call.arguments[:-1], [*args[-1][:2], False]])
            cost = count_operator(name, call.shapes, call.dtypes, call.arguments)
            self._add(cost.flops if cost else 0.0)
        return function(*args, **(kwargs or {}))

    def _add(self, flops: float) -> None:
        stack = self._stack()
        if _is_in_backward():
            self.backward += flops
        elif stack or torch.is_grad_enabled():  # an optimizer's own products run without gradients
            self.forward += flops
            if stack:
                stack[-1].flops += flops


def _is_in_backward() -> bool:
    return current_graph_task_id() != -1


class _SavedTensor:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _SavedTensors:
    """Counts the bytes that autograd stores for the backward pass, each storage once while it is stored.

    Args:
        known: storages of parameters, buffers and the batch, which aren't counted.
    """

    def __init__(self, known: set[int], stack: Callable[[], list[_ModuleCalls]]) -> None:
        self.bytes = self.peak_bytes = 0
        self._known = known
        self._stack = stack
        self._uses: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> _SavedTensor:
        saved, key = _SavedTensor(tensor), _storage(tensor)
        if key in self._known:
            return saved
        size = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
            if (stack := self._stack()) and not _is_in_backward():
                stack[-1].activations += size
        weakref.finalize(saved, self._release, key, size)
        return saved

    def _release(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self.bytes -= size

    @staticmethod
    def unpack(saved: _SavedTensor) -> Tensor:
        return saved.tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
