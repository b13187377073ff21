"""Hooks that note, in order of occurrence, how large each value of a step is: inputs, outputs, gradients.

Gradients are seen by hooks on tensors, since backward hooks of modules can't bear operations in place.
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
        kind: of the batch, a module's output, or a gradient.
        name: `input`, `the output of 'layers.3' (Linear)`, `the gradient of parameter 'layers.3.weight'`.
        largest: its largest magnitude, 0-dim on its device; NaN or infinite if any of its elements is.
        call: the module's call that put it out; None if no module did.
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
    """One call of a module: what it put out, and within which other call."""

    within: _Call | None
    outputs: list[ValueEvent] = field(default_factory=list)

    @property
    def is_absorbed(self) -> bool:
        """Whether a call around this one put out finite values: what isn't finite inside was meant, like a mask."""
        around = self.within
        while around is not None:
            if around.outputs and all(event.is_finite for event in around.outputs):
                return True
            around = around.within
        return False


class ValueHooks:
    """Notes the events of one step at a time, and remembers which values weren't finite in steps that were good."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.events: list[ValueEvent] = []
        self._usual: set[tuple[str, str]] = set()
        self._stack: list[_Call] = []
        self._calls: Counter[int] = Counter()
        self._names = module_titles(model)

    @contextmanager
    def record(self) -> Iterator[ValueHooks]:
        """Puts the hooks on the model for as long as the context lasts."""
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
        """Forgets the last step; notes a batch."""
        self.events, self._stack = [], []
        self._calls.clear()
        self.note_batch(batch)

    def note_batch(self, batch: Any) -> None:
        """Notes the values of a batch as what came first."""
        noted = [event for name, tensor in floating_parts(batch) if (event := _value_event("batch", name, tensor))]
        self.events = noted + self.events

    def end_step(self) -> None:
        """The step was good: what isn't finite in it is usual."""
        self._usual |= {(event.kind, event.name) for event in self.events if not event.is_finite}

    def first(self, *, loss_finite: bool) -> ValueEvent | None:
        """The first value to blame for a step that went wrong.

        An infinity in the forward pass is not to blame if good steps had it too, if it stayed inside a module whose
        own output is finite, or if the loss is finite all the same; NaN is meant more rarely, so that only the first
        two excuse it. A gradient is to blame if the loss before it is finite, and good steps had no such gradient.
        """
        bad = [event for event in self.events if not event.is_finite]
        new = [event for event in bad if (event.kind, event.name) not in self._usual]
        return next((event for event in new if self._origin_of(event, loss_finite)), None)

    def finite_before(self, event: ValueEvent) -> ValueEvent | None:
        """The last gradient of an output that was still finite before this one."""
        before = self.events[: self.events.index(event)]
        found = [other for other in before if other.kind == "gradient" and " output " in other.name and other.is_finite]
        return found[-1] if found else None

    def _origin_of(self, event: ValueEvent, loss_finite: bool) -> bool:
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
    """The event of a tensor; None if it has no values, or none that could fail to be finite."""
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
