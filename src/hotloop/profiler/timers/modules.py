"""Times forward and backward of each module, in otherwise unchanged steps.

One clock follows the training thread. At each instant the clock belongs to one module: the innermost module whose
forward runs, or whose forward made the node that runs backward. So times add up; the clock's own overhead is left out.

- Forward: see `ModuleCallHooks`.
- Backward: torch numbers nodes as they are made, per thread, and runs them from the highest number down. The numbers
  between entering and leaving a module are its nodes, so hooks are needed only where the owner changes. Parameter
  gradients are accumulated right after the node that made them.
- A forward that runs during backward (checkpointing) counts to the backward of its module.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotloop.core.patches import Patches
from hotloop.core.records.profile import ModuleTime
from hotloop.core.torch_private import DisableTorchDispatch, DisableTorchFunction, next_sequence_number
from hotloop.distributed.wrappers.ddp import WrapperMarker
from hotloop.profiler.base.steps import Kind, middle_mean
from hotloop.profiler.base.transparency import RecursionHeadroom, hide_from_compiler, hide_from_warnings, strip_frame
from hotloop.profiler.hooks.torch_hooks import with_callbacks
from hotloop.profiler.timers.module_names import (
    ModuleName,
    ModuleNames,
    ModulePlace,
    OwnTime,
    is_generated,
    module_times,
)


class ModuleListener(Protocol):
    """Is notified of the training thread's module calls; in a backward pass, of those of torch's threads too."""

    def enter(self, module: nn.Module, args: tuple) -> Any:
        """A module's forward begins; the result is passed to `leave`."""

    def leave(self, before: Any) -> None:
        """The forward has ended, also by an error."""

    def backward(self, roots: Any) -> AbstractContextManager[None]:
        """A pass of the autograd engine below some tensors; passes may be nested."""


@hide_from_compiler
class ModuleCallHooks:
    """Opened by the training thread, and removed by `close`; `depth` counts nested passes of the autograd engine."""

    def __init__(self, listener: ModuleListener) -> None:
        self.depth, self._listener = 0, listener
        self._open = self._loading = False
        self._thread = 0
        self._patches, self._headroom = Patches(), RecursionHeadroom()

    def open(self) -> None:
        self.depth, self._thread, self._loading = 0, threading.get_ident(), False
        self._headroom.make()
        self._patches.patch(nn.Module, "__call__", self._call)
        self._patches.patch(torch.autograd, "_engine_run_backward", self._run)
        loading = with_callbacks(self._is_loading_begun, self._note_loading, self._note_loaded)
        self._patches.patch(_BaseDataLoaderIter, "__next__", loading)
        self._open = True

    def close(self) -> None:
        """Restores the originals, unless other code has replaced the hooks since."""
        self._open = False
        self._patches.undo()
        self._headroom.give_back()

    def _is_loading_begun(self) -> bool:
        """A loader may draw from another loader; only the outer one counts."""
        return self._open and not self._loading and threading.get_ident() == self._thread

    def _note_loading(self, args: tuple, kwargs: dict) -> None:
        self._loading = True

    def _note_loaded(self, *ended: Any) -> None:
        self._loading = False

    @hide_from_warnings
    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        compiling, ident = torch.compiler.is_compiling, threading.get_ident
        enter, leave = self._listener.enter, self._listener.leave

        @wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(module, *args, **kwargs)
            is_other_thread = ident() != self._thread and not self.depth
            reports = self._open and not (is_other_thread or self._loading or isinstance(module, WrapperMarker))
            before = enter(module, args) if reports else None
            try:
                return original(module, *args, **kwargs)
            except BaseException as error:
                error.__traceback__ = strip_frame(error)
                raise
            finally:
                if reports:
                    leave(before)

        return hide_from_compiler(call)

    @hide_from_warnings
    def _run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            reports = self._open and not torch.compiler.is_compiling()
            try:
                with self._listener.backward(t_outputs) if reports else nullcontext():
                    self.depth += reports
                    try:
                        return original(t_outputs, *args, **kwargs)
                    finally:
                        self.depth -= reports
            except BaseException as error:
                error.__traceback__ = strip_frame(error)
                raise

        return hide_from_compiler(call)


OVERHEAD_CALLS, OVERHEAD_REPEATS = 100, 3


class _View(nn.Module):
    """Makes a graph node without work; has no `forward`, around which torch would call the script's hooks."""

    def _call_impl(self, x: Tensor) -> Tensor:
        return x.view_as(x)


def measure_clock_overhead(clock: ModuleClock) -> tuple[float, float]:
    """Returns nanoseconds of overhead per forward call and per change of module in backward; takes 10 ms."""
    with (  # the script's modes see no operation
        DisableTorchFunction(),
        DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        plain = [_time_pass_ns(None) for _ in range(OVERHEAD_REPEATS)]
        clocked = [_time_pass_ns(clock) for _ in range(OVERHEAD_REPEATS)]
    forward, backward = (min(run[at] for run in clocked) - min(run[at] for run in plain) for at in (0, 1))
    return max(0.0, forward / OVERHEAD_CALLS), max(0.0, backward / OVERHEAD_CALLS)


def _time_pass_ns(clock: ModuleClock | None) -> tuple[int, int]:
    turns = (_View(), _View())
    x = first = torch.zeros(1, device="cpu", requires_grad=True)
    if clock is not None:
        clock.begin()
    began, cost = time.perf_counter_ns(), 0
    for number in range(OVERHEAD_CALLS):
        x = turns[number % 2](x)
    forward = time.perf_counter_ns()
    if clock is not None:
        cost = clock.cost_ns
    torch.autograd.grad(x, first)
    backward = time.perf_counter_ns()
    if clock is None:
        return forward - began, backward - forward
    clock.end()
    return forward - began - cost, backward - forward - (clock.cost_ns - cost)


FORWARD, BACKWARD = 0, 1

_LEAF = 2**64 - 1
"""Sequence number of nodes that accumulate gradients."""

_MAX_STEPS = 512
"""Stored steps per module."""

_MAX_SWITCHES = 1_000_000
"""Stored changes of owner per step."""


@hide_from_compiler
class ClockOwner:
    """An owner of the clock: a module, or a part of the step outside of modules.

    Attributes:
        place: naming data.
        ns: own forward and backward time in this step.
        calls: number of forwards in this step, without recomputation in backward.
        inside: number of switches, forward and backward, during this ownership.
    """

    __slots__ = ("calls", "inside", "ns", "place")

    def __init__(self, place: ModulePlace) -> None:
        self.place = place
        self.ns = [0, 0]
        self.calls = 0
        self.inside = [0, 0]

    def clear(self) -> None:
        self.ns, self.calls, self.inside = [0, 0], 0, [0, 0]


@hide_from_compiler
class ModuleClock:
    """Times modules in the steps between `begin()` and `end()`; nothing is installed between steps.

    Attributes:
        cost_ns: the clock's own time in the current or last step; in no module's time.
        notes: sentences on what was not measured.
    """

    kinds: Sequence[Kind] = ("clocked", "whole")

    def __init__(
        self,
        now: Callable[[], int] = time.perf_counter_ns,
        handover_ns: tuple[float, float] | None = None,
        namer: ModuleNames | None = None,
    ) -> None:
        """Args:
        now: the time in nanoseconds.
        handover_ns: overhead of a switch, forward and backward; None measures the overhead.
        namer: shared with other recorders for equal names.
        """
        self.cost_ns = 0
        self.notes: list[str] = []
        self._now = now
        self._namer = namer or ModuleNames()
        self._owners: dict[int, ClockOwner] = {}
        self._outside_owner = ClockOwner(ModulePlace.part("(functional)"))
        self._after = ClockOwner(ModulePlace.part("(loss)"))
        self._apart = ClockOwner(ModulePlace.part("(apart)"))
        self._times: dict[ModuleName, _Times] = {}
        self._steps = 0
        self._active = False
        self._module_hooks = ModuleCallHooks(self)
        self._overhead_ns = handover_ns

    def begin(self) -> None:
        if self._overhead_ns is None:
            self._overhead_ns = measure_clock_overhead(ModuleClock(handover_ns=(0.0, 0.0)))
        self._owner, self._direction = self._outside_owner, FORWARD
        self._made: dict[int, tuple[list[int], list[ClockOwner]]] = {}
        self.cost_ns = 0
        self._module_hooks.open()
        self._active = True
        self._since = self._now()

    def end(self) -> None:
        """Ends the step, stores its times, and removes all hooks."""
        self._end(keep=True)

    def drop(self) -> None:
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        if not self._active:
            return
        self._active = False
        self._module_hooks.close()
        self._made = {}
        owners = [*self._owners.values(), self._outside_owner, self._after]
        self._namer.name([owner.place for owner in owners])
        found: dict[ModuleName, OwnTime] = {}
        for owner in owners:
            self._add(owner, found)
            owner.clear()
        self._apart.clear()
        self._owners = {key: owner for key, owner in self._owners.items() if owner.place.is_alive}
        if keep:
            for name, step in found.items():
                self._times.setdefault(name, _Times()).add(step)
            self._steps += 1

    def close(self) -> None:
        self.end()
        self._owners = {}

    def times(self, step_ms: float | None) -> list[ModuleTime]:
        """Returns all modules by name, parents first, from means of the middle half of steps; see `module_times`."""
        return module_times(self.own(), self._namer.kinds, step_ms)

    def own(self) -> dict[ModuleName, OwnTime]:
        return {name: times.per_step(self._steps) for name, times in self._times.items()}

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Returns no fields of `ProfileFacts`: the operators complete the times first."""
        return {}

    def _add(self, owner: ClockOwner, found: dict[ModuleName, OwnTime]) -> None:
        """Adds an owner's times in ms, less the overhead of switches."""
        assert self._overhead_ns is not None
        own = [max(0.0, owner.ns[at] - owner.inside[at] * self._overhead_ns[at]) / 1e6 for at in (FORWARD, BACKWARD)]
        name = owner.place.name
        assert name is not None
        forward = 0.0 if owner in (self._outside_owner, self._after) else own[FORWARD]
        calls = 0 if is_generated(owner.place) else owner.calls
        if forward or own[BACKWARD] or calls:
            found[name] = found.get(name, OwnTime(0.0, 0.0, 0.0)) + OwnTime(forward, own[BACKWARD], calls)

    def enter(self, module: nn.Module, args: tuple) -> ClockOwner:
        """A module's forward begins; returns the previous owner."""
        now, before = self._now(), self._owner
        before.ns[self._direction] += now - self._since
        owner = self._owners.get(id(module))
        if owner is None or owner.place.module is not module:
            inside = None if before in (self._outside_owner, self._after) else before.place
            owner = self._owners[id(module)] = ClockOwner(ModulePlace.from_call(module, inside, sys._getframe(2)))
        owner.calls += not self._module_hooks.depth
        self._switch_owner(owner, before, now)
        return before

    def leave(self, before: ClockOwner) -> None:
        now = self._now()
        self._owner.ns[self._direction] += now - self._since
        if before is self._outside_owner and not self._module_hooks.depth:
            before = self._after
        self._switch_owner(before, None, now)

    def pause(self) -> ClockOwner | None:
        """Stops counting to modules until `resume`; returns the previous owner."""
        if not self._active:
            return None
        before = self._owner
        self._reach(self._apart, None)
        return before

    def resume(self, before: ClockOwner | None) -> None:
        if self._active and before is not None:
            self._reach(before, None)

    def _switch_owner(self, owner: ClockOwner, counted: ClockOwner | None, now: int) -> None:
        """Changes the owner of the clock and of the nodes made from here on."""
        if counted is not None:
            counted.inside[self._direction] += 1
        numbers, owners = self._made_here()
        number = next_sequence_number()
        if numbers and numbers[-1] == number:
            owners[-1] = owner
        else:
            if len(numbers) >= _MAX_SWITCHES:  # an endless step; hardly any of the oldest nodes is alive
                del numbers[: _MAX_SWITCHES // 2], owners[: _MAX_SWITCHES // 2]
            numbers.append(number)
            owners.append(owner)
        self._owner = owner
        self._since = self._now()
        self.cost_ns += self._since - now

    def _made_here(self) -> tuple[list[int], list[ClockOwner]]:
        return self._made.setdefault(threading.get_ident(), ([], []))

    @contextmanager
    def backward(self, roots: Any) -> Iterator[None]:
        now, before, direction = self._now(), self._owner, self._direction
        before.ns[direction] += now - self._since
        first, handles = self._hook(roots)
        self._direction = BACKWARD
        self._switch_owner(first or before, None, now)
        try:
            yield
        finally:
            now = self._now()
            self._owner.ns[BACKWARD] += now - self._since
            for handle in handles:
                handle.remove()
            self._direction = direction
            self._switch_owner(before, None, now)

    def _hook(self, roots: Any) -> tuple[ClockOwner | None, list[Any]]:
        """Hooks the nodes where the owner changes; returns the first node's owner, and the hooks' handles."""
        numbers, owners = self._made_here()
        handles, first, last = [], None, None
        for node, number in sorted(_numbered_nodes(roots).items(), key=itemgetter(1), reverse=True):
            at = bisect_right(numbers, number) - 1
            owner = owners[at] if at >= 0 else self._outside_owner
            if last is None:
                first = owner
            elif owner is not last:
                handles.append(node.register_prehook(partial(self._reach, owner)))
                entered = node
            last = owner
        if handles and first is not None:
            handles.append(entered.register_prehook(partial(self._then, first)))
        return first, handles

    def _then(self, owner: ClockOwner, _: Any) -> None:
        """The owner that begins a pass gets the clock back for the engine's cleanup at the end."""
        Variable._execution_engine.queue_callback(partial(self._reach, owner, None))

    def _reach(self, owner: ClockOwner, _: Any) -> None:
        now = self._now()
        self._owner.ns[self._direction] += now - self._since
        self._switch_owner(owner, owner, now)


class _Times:
    def __init__(self) -> None:
        self._forward: deque[float] = deque(maxlen=_MAX_STEPS)
        self._backward: deque[float] = deque(maxlen=_MAX_STEPS)
        self._calls = 0.0
        self._steps = 0

    def add(self, step: OwnTime) -> None:
        self._forward.append(step.forward_ms)
        self._backward.append(step.backward_ms)
        self._calls += step.calls
        self._steps += 1

    def per_step(self, steps: int) -> OwnTime:
        """Mean over steps with the module, times their share of all steps."""
        share = self._steps / steps
        return OwnTime(share * middle_mean(self._forward), share * middle_mean(self._backward), self._calls / steps)


def _numbered_nodes(roots: Any) -> dict[Any, int]:
    """All nodes of the graph below with their numbers, without nodes that accumulate gradients."""
    with DisableTorchFunction():  # the script's modes see no operation
        waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    found: dict[Any, int] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        number = node._sequence_nr()
        if number != _LEAF:
            found[node] = number
            waiting.extend([following for following, _ in node.next_functions])
    return found
