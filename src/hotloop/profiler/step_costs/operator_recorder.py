"""A dispatch mode that records the operators of a step and the bytes of all living tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from hotloop.core.dispatch_mode import ReadOnlyDispatchMode
from hotloop.core.records.step_costs import OperatorCost, StepPhase
from hotloop.profiler.costs.op_cost import OpCall
from hotloop.profiler.costs.operator_cost import count_operator
from hotloop.profiler.step_costs.data_dependence import answer_item, with_all_elements
from hotloop.profiler.step_costs.operator_kinds import kernel_launches, operator_kind, operator_shape
from hotloop.profiler.step_costs.workspace import saved_workspace_bytes, workspace_bytes

_WITHOUT_COST = ("prim", "profiler")


class StepRecorder(ReadOnlyDispatchMode):
    """Records operators, and the peak of the bytes of all tensors that it saw.

    On fake tensors, an operator whose result depends on values gets an answer: see `data_dependence`.

    Attributes:
        phase: of operators outside of the backward graph.
        is_recording: whether operators are recorded; the memory always is.
        calls: equal operators with their number.
        live_bytes: of living storages.
        largest_bytes: of one storage that a recorded operator made.
        peaks: the most `live_bytes` by phase, with the workspace of operators.
        notes: answers to operators whose result depends on values.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.phase: StepPhase = "forward"
        self.is_recording = False
        self.weight = 1
        self.calls: dict[OperatorCost, int] = {}
        self.live_bytes = self.largest_bytes = 0
        self.peaks: dict[str, int] = {"forward": 0, "backward": 0, "update": 0}
        self.notes: dict[str, None] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._last_truth: Any = lambda: None  # the storage of the last result of `torch.all`

    def add_tensors(self, tensors: Iterable[Tensor]) -> int:
        """Counts tensors that no operator under this mode made; returns the bytes of those that are new."""
        before = self.live_bytes
        for tensor in tensors:
            self._track(tensor)
        return self.live_bytes - before

    def reset_peaks(self) -> None:
        self.peaks = dict.fromkeys(self.peaks, 0)

    @property
    def operators(self) -> tuple[OperatorCost, ...]:
        return tuple(replace(one, count=number) for one, number in self.calls.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _WITHOUT_COST:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if name == "_local_scalar_dense":
                if self.phase != "update":  # an optimizer reads its number of steps
                    self.notes["a value that the step reads is taken as 1, or as false for a condition"] = None
                return answer_item(tensors[0], self._last_truth() is tensors[0].untyped_storage())
            if (changed := with_all_elements(name, args)) is not None:
                self.notes["a choice by a mask is counted as if it chose all elements"] = None
                if not isinstance(changed, tuple):
                    self._track(changed)
                    return changed
                args = changed
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and self.phase == "update":  # an optimizer reads its number of steps
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._observe(func, args, kwargs, tensors, made)
        if name == "all":
            self._last_truth = weakref.ref(made[0].untyped_storage())
        return result

    def _observe(self, func: Any, args: Any, kwargs: Any, read: list[Tensor], made: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        arguments = _by_position(func, args, kwargs)
        new = [tensor for tensor in made if self._track(tensor)]
        if new and (saved := saved_workspace_bytes(name, arguments)) and not new[-1].numel():
            self._add_bytes(new[-1], saved)
        phase: StepPhase = self.phase
        if phase == "forward" and torch._C._current_autograd_node() is not None:
            phase = "backward"
        written = [*new, *_mutated(func, args, kwargs)]
        self.peaks[phase] = max(self.peaks[phase], self.live_bytes + workspace_bytes(name, arguments, self.device))
        if self.is_recording:
            cost = _cost(func, name, phase, arguments, read, written)
            self.calls[cost] = self.calls.get(cost, 0) + self.weight

    def _track(self, tensor: Tensor) -> bool:
        """Counts the tensor's storage; returns whether it is new."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have none
            return False
        key, size = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is not None and known() is storage:
            return False
        self._storages[key] = weakref.ref(storage, partial(self._free, key, size))
        self.live_bytes += size
        if self.is_recording:
            self.largest_bytes = max(self.largest_bytes, size)
        return True

    def _add_bytes(self, tensor: Tensor, size: int) -> None:
        """Adds bytes that live as long as the tensor's storage."""
        self.live_bytes += size
        weakref.finalize(tensor.untyped_storage(), self._subtract, size)

    def _subtract(self, size: int) -> None:
        self.live_bytes -= size

    def _free(self, key: int, size: int, reference: Any) -> None:
        self.live_bytes -= size
        if self._storages.get(key) is reference:
            del self._storages[key]


def _by_position(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns all arguments in the order of the operator's schema, defaults included."""
    named = func._schema.arguments
    rest = [kwargs.get(one.name, one.default_value) for one in named[len(args) :]]
    return [*args, *rest]


def _mutated(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(one.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _touched_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors, each once; an expanded tensor has those of its storage."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(
        min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        if tensor.layout == torch.strided
        else tensor.numel() * tensor.element_size()
        for tensor in unique.values()
    )


def _cost(
    func: Any, name: str, phase: StepPhase, arguments: list[Any], read: list[Tensor], written: list[Tensor]
) -> OperatorCost:
    call = _op_call(arguments)
    full_name = str(func).rpartition(".")[0] or str(func)
    lists = [value for value in arguments if isinstance(value, list | tuple) and _has_tensors(value)]
    longest = max(lists, key=len, default=[])
    elements = sum(tensor.numel() for tensor in written)
    read_elements = max((tensor.numel() for tensor in read), default=0)
    dtype = _arithmetic_dtype(read, written)
    gradients = sum(map(bool, arguments[10][:2])) if name == "convolution_backward" else 1
    kind = operator_kind(name, phase) if written else "view"
    if kind == "view" or name.startswith(("empty", "new_empty", "lift_fresh")):
        return OperatorCost(full_name, "view", phase, 0, 0, 0, (), dtype, launches=0, tensors=len(read))
    counted = count_operator(name, call.shapes, call.dtypes, call.arguments)
    written_bytes = _touched_bytes(written)
    if counted is not None and counted.bytes is not None:
        read_bytes = max(int(counted.bytes) - written_bytes, 0)
    else:
        read_bytes = _touched_bytes(read)
    if counted is not None:
        flops = int(counted.flops)
    else:
        flops = max(elements, read_elements) if kind in ("elementwise", "reduction", "update", "other") else 0
    return OperatorCost(
        full_name,
        kind,
        phase,
        flops,
        read_bytes,
        written_bytes,
        tuple(map(int, operator_shape(kind, name, call, read_elements, elements))),
        dtype,
        kernel_launches(kind, name, len(lists), len(longest), elements, gradients),
        tensors=len(read) + len(written),
        gradients=gradients,
    )


def _has_tensors(value: Any) -> bool:
    return any(isinstance(item, Tensor) for item in value)


def _op_call(arguments: list[Any]) -> OpCall:
    shapes: list[Any] = []
    dtypes: list[str] = []
    values: list[Any] = []
    for value in arguments:
        tensors = []
        if isinstance(value, Tensor):
            tensors = [value]
            shapes.append(list(value.shape))
        elif isinstance(value, list | tuple) and _has_tensors(value):
            tensors = [item for item in value if isinstance(item, Tensor)]
            shapes.append([list(item.shape) for item in tensors])
        else:
            shapes.append([])
        dtypes.append(str(tensors[0].dtype).removeprefix("torch.") if tensors else "")
        values.append(None if tensors else value)
    return OpCall(shapes, dtypes, values)


def _arithmetic_dtype(read: list[Tensor], written: list[Tensor]) -> str:
    """Returns the narrowest floating dtype of what is read, else of what is written, else any dtype."""
    for tensors in (read, written):
        floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.ndim]
        if floating:
            return str(min(floating, key=lambda tensor: tensor.element_size()).dtype).removeprefix("torch.")
    anything = [*written, *read]
    return str(anything[0].dtype).removeprefix("torch.") if anything else "float32"


def parameter_elements(tensors: Iterable[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in {id(tensor): tensor for tensor in tensors}.values())
