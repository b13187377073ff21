"""Hooks that record the largest magnitude of each input, output and gradient of a step, in order.

Gradients have hooks on tensors, since backward hooks of modules fail with in-place operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hotloop.data.batch_tree import tree_tensors
from hotloop.lowering.failures.location import floating_parts, module_titles

ValueKind = Literal["batch", "output", "gradient"]


@dataclass
class ValueEvent:
    """One value of a step.

    Attributes:
        name: `input`, `the output of 'layers.3' (Linear)`, `the gradient of parameter 'layers.3.weight'`.
        largest: the largest magnitude, 0-dim on the value's device; NaN or infinite if any element is.
        call: the call of a module that returned it; None for other values.
    """

    kind: ValueKind
    name: str
    largest: Tensor
    call: _Call | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(float(self.largest))

    @property
    def state(self) -> str:
        """`NaN` or `infinite`."""
        return "NaN" if math.isnan(float(self.largest)) else "infinite"


@dataclass
class _Call:
    """One call of a module: its outputs, and the call that contains it."""

    within: _Call | None
    outputs: list[ValueEvent] = field(default_factory=list)

    @property
    def is_absorbed(self) -> bool:
        """Whether a containing call returned finite values: an infinity inside, such as a mask, is intended."""
        around = self.within
        while around is not None:
            if around.outputs and all(event.is_finite for event in around.outputs):
                return True
            around = around.within
        return False


class ValueHooks:
    """Records the events of one step at a time, and which values weren't finite in good steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.events: list[ValueEvent] = []
        self._usual: set[tuple[str, str]] = set()
        self._stack: list[_Call] = []
        self._calls: Counter[int] = Counter()
        self._names = module_titles(model)

    @contextmanager
    def record(self) -> Iterator[ValueHooks]:
        """Registers the hooks for the duration of the context."""
        handles: list[Any] = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_hook(self._record(f"the gradient of parameter {name!r}")))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, batch: Any = None) -> None:
        """Clears the last step's events and records a batch."""
        self.events, self._stack = [], []
        self._calls.clear()
        self.note_batch(batch)

    def note_batch(self, batch: Any) -> None:
        """Records a batch's values before all others."""
        noted = [event for name, tensor in floating_parts(batch) if (event := _value_event("batch", name, tensor))]
        self.events = noted + self.events

    def end_step(self) -> None:
        """Ends a good step: its infinite values and NaN count as usual."""
        self._usual |= {(event.kind, event.name) for event in self.events if not event.is_finite}

    def first(self, *, loss_finite: bool) -> ValueEvent | None:
        """Returns the first value that caused a bad step.

        An infinity in the forward pass is no cause if good steps had it as well, if it stayed inside a module with
        finite outputs, or if the loss is finite. For NaN, which is rarely intended, only the first two count. A
        gradient is a cause if the loss is finite and good steps had no such gradient.
        """
        bad = [event for event in self.events if not event.is_finite]
        new = [event for event in bad if (event.kind, event.name) not in self._usual]
        return next((event for event in new if self._is_cause(event, loss_finite)), None)

    def finite_before(self, event: ValueEvent) -> ValueEvent | None:
        """Returns the last finite gradient of an output before this event."""
        before = self.events[: self.events.index(event)]
        found = [other for other in before if other.kind == "gradient" and " output " in other.name and other.is_finite]
        return found[-1] if found else None

    def _is_cause(self, event: ValueEvent, loss_finite: bool) -> bool:
        if event.kind == "gradient":
            return loss_finite
        if event.call is not None and event.call.is_absorbed:
            return False
        return not loss_finite or event.state == "NaN"

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(_Call(self._stack[-1] if self._stack else None))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._stack.pop()
        self._calls[id(module)] += 1
        times = self._calls[id(module)]
        name = f"output of {self._names[id(module)]}" + (f" in its call {times}" if times > 1 else "")
        for tensor in tree_tensors(output):
            event = _value_event("output", f"the {name}", tensor, call)
            if event is None:
                continue
            call.outputs.append(event)
            self.events.append(event)
            if tensor.requires_grad:
                tensor.register_hook(self._record(f"the gradient of the {name}"))

    def _record(self, name: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            if (event := _value_event("gradient", name, gradient)) is not None:
                self.events.append(event)

        return note


def _value_event(kind: ValueKind, name: str, tensor: Tensor, call: _Call | None = None) -> ValueEvent | None:
    """Returns the event of a tensor; None without values, or if all values are always finite."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce()
    if values.layout is not torch.strided:
        values = values.values()
    numbers = values.is_floating_point() or values.is_complex()
    if not numbers or values.numel() == 0 or values.is_meta:
        return None
    wide = values.float() if values.is_floating_point() and values.itemsize == 1 else values
    return ValueEvent(kind, name, torch.linalg.vector_norm(wide, math.inf), call)
