"""Optimizers, as they were used."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import Timeline
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.profiler.hooks.torch_hooks import with_callbacks


@hide_from_compiler
class _TimedGroups(list):
    """The groups of an optimizer, which note when each is asked for."""

    def __init__(self, groups: list[dict[str, Any]], asked: Callable[[int | None], None]) -> None:
        super().__init__(groups)
        self.groups, self._asked = groups, asked

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.groups):
            self._asked(number)
            yield group
        self._asked(None)


@hide_from_compiler
class GroupClock:
    """Times one update at a time: a group has the clock from when the optimizer asks for it to when it asks for the next."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent: dict[int, float] = {}
        self._group: int | None = None
        self._since = 0.0

    def begin(self, optimizer: Optimizer) -> None:
        """An update begins; its groups stand in a list that is watched until `end`."""
        self._spent, self._group = {}, None
        compiled = hasattr(optimizer.step, "_torchdynamo_orig_callable")  # it would be compiled again for another list
        if len(optimizer.param_groups) > 1 and not compiled:
            optimizer.param_groups = _TimedGroups(_original_groups(optimizer.param_groups), self._asked)

    def end(self, optimizer: Optimizer) -> dict[int, float]:
        """Seconds by the number of the group; empty where the optimizer has one, or doesn't take them one by one."""
        self._asked(None)
        optimizer.param_groups = _original_groups(optimizer.param_groups)
        return self._spent

    def _asked(self, group: int | None) -> None:
        now = self._now()
        if self._group is not None:
            self._spent[self._group] = self._spent.get(self._group, 0.0) + now - self._since
        self._group, self._since = group, now


def _original_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's own list, also after an update that an error ended."""
    return groups.groups if isinstance(groups, _TimedGroups) else groups


_NOT_SETTINGS = ("params", "param_names", "name")
"""What a group holds that says nothing of how it is updated."""


class _OptimizerStats:
    """What is known of one optimizer; `latest` gives it, or the one that was made anew in its place."""

    def __init__(self, optimizer: Optimizer, number: int, where: str) -> None:
        self.latest, self.number, self.where = weakref.ref(optimizer), number, where
        self.kind, self.implementation = type(optimizer).__name__, _implementation(optimizer)
        self.groups = [_group(group, number) for number, group in enumerate(optimizer.param_groups)]
        self.settings = [_settings(group) for group in optimizer.param_groups]
        self.spent: list[float] = []
        self.evaluations = self.recreations = 0
        self.by_group: dict[int, list[float]] = {}


class OptimizerRecorder:
    """Times updates in the steps that are on.

    Attributes:
        on: whether updates are timed.
        nests: whether one was seen inside another.
        inside: how many updates are under way, one inside another.
    """

    def __init__(self, sites: CallSites) -> None:
        self.on = self.has_nested = False
        self._sites = sites
        self._used: list[_OptimizerStats] = []
        self._by_id: dict[int, _OptimizerStats] = {}
        self._open: list[tuple[int, float]] = []
        self._nested, self._evaluations = 0.0, 0
        self._groups = GroupClock()
        self._last_update_s: float | None = None
        self._by_group: dict[int, float] = {}

    @property
    def is_inside(self) -> bool:
        return bool(self._open)

    def began(self, optimizer: Optimizer) -> None:
        if self._open and self._open[0][0] == id(optimizer):
            self._open = []  # it can't be inside itself: the last one was left by an error
        self._open.append((id(optimizer), time.perf_counter()))
        if len(self._open) == 1:
            self._nested, self._evaluations = 0.0, 0
            if self.on:
                self._groups.begin(optimizer)

    def ended(self, optimizer: Optimizer) -> bool:
        """Whether it was the outermost."""
        self._last_update_s = None
        if not self._open:
            return True
        began = self._open.pop()[1]
        if self._open:
            self.has_nested = True
            return False
        self._last_update_s = time.perf_counter() - began - self._nested
        self._by_group = self._groups.end(optimizer)
        return True

    def closure_called(self) -> None:
        """The optimizer whose update is under way calls its closure."""
        if self.on and self._open:
            self._evaluations += 1

    def forget(self) -> None:
        """What they took and where is forgotten; their numbers stay, since steps are told by them."""
        self.on = False
        for used in self._used:
            used.where, used.spent, used.by_group, used.evaluations, used.recreations = "", [], {}, 0, 0

    def exclude_time(self, seconds: float) -> None:
        """A forward or backward that a closure ran inside of an update is not its own time."""
        if self._open:
            self._nested += seconds

    def number(self, optimizer: Optimizer, where: str) -> int:
        """By which it is told from others, of one that has just stepped; one that is made anew takes its predecessor's."""
        used = self._known(optimizer)
        if used is None:
            used = next((one for one in self._used if one.where == where and one.latest() is None), None)
            if used is not None:
                used.latest = weakref.ref(optimizer)
                used.recreations += self.on
            else:
                used = _OptimizerStats(optimizer, len(self._used), where)
                self._used.append(used)
            self._by_id = {id(one.latest()): one for one in self._used if one.latest() is not None}
        used.where = used.where or where
        if self.on and self._last_update_s is not None:
            used.spent.append(self._last_update_s)
            used.evaluations += self._evaluations
            for group, seconds in self._by_group.items():
                used.by_group.setdefault(group, []).append(seconds)
        return used.number

    def class_and_line(self, number: int) -> dict[str, str]:
        """Its class and line."""
        return {"kind": self._used[number].kind, "where": self._used[number].where}

    def _known(self, optimizer: Optimizer) -> _OptimizerStats | None:
        used = self._by_id.get(id(optimizer))
        return used if used is not None and used.latest() is optimizer else None

    def parameters(self) -> Iterator[Tensor]:
        """Of all that have stepped."""
        alive = (one for used in self._used if (one := used.latest()) is not None)
        return (value for one in alive for group in one.param_groups for value in group["params"])

    def records(self, steps: int) -> list[dict[str, Any]]:
        """As `profiles.OptimizerUse`."""
        instrumented, settings = max(1, steps // 2), self._settings()
        return [
            {
                "kind": used.kind,
                "where": used.where,
                "implementation": used.implementation,
                "groups": [
                    {
                        **group,
                        "settings": settings[used.settings[number]],
                        "ms": _per_step(used.by_group.get(number, []), instrumented),
                    }
                    for number, group in enumerate(used.groups)
                ],
                "steps": len(used.spent) / instrumented,
                "ms": _per_step(used.spent, instrumented),
                "evaluations": used.evaluations / len(used.spent),
                "made": used.recreations / len(used.spent),
            }
            for used in self._used
            if used.spent
        ]

    def _settings(self) -> dict[tuple[Any, ...], int]:
        """A number for each that some group has, whichever optimizer it belongs to."""
        return {
            one: number for number, one in enumerate(dict.fromkeys(one for used in self._used for one in used.settings))
        }


class NextUpdates:
    """Whether there is an optimizer that may step yet: its parameters have gradients, and nobody else changes them.

    Optimizers may have been made before anybody watched, and torch keeps no list of them.
    """

    def __init__(self) -> None:
        self._parameter: Tensor | None = None
        self._before: Tensor | None = None

    def is_expected(self) -> bool:
        """Asked again and again, of which the first time takes some 10 ms."""
        if self._parameter is None or self._before is None:
            self._parameter = min(_parameters_with_gradients(), key=Tensor.numel, default=None)
            self._before = None if self._parameter is None else self._parameter.detach().clone()
            return self._parameter is not None
        return torch.equal(self._parameter, self._before)


def _parameters_with_gradients() -> Iterator[Tensor]:
    """Parameters of optimizers."""
    made = (one for one in gc.get_objects() if issubclass(type(one), Optimizer))
    groups = (group for one in made for group in getattr(one, "param_groups", ()))
    return (value for group in groups for value in group["params"] if value.grad is not None)


def _per_step(seconds: list[float], steps: int) -> float | None:
    """Milliseconds in a step; None where nothing was timed."""
    return median(seconds) * 1e3 * len(seconds) / steps if seconds else None


def _group(group: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "name": str(group.get("name", number)),
        "tensors": len(group["params"]),
        "numbers": sum(value.numel() for value in group["params"]),
        "ms": None,
    }


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """All that an update goes by."""
    return tuple((name, _setting_key(value)) for name, value in sorted(group.items()) if name not in _NOT_SETTINGS)


def _setting_key(value: Any) -> Any:
    """What a setting is told by: itself, or which object it is, since a tensor is read from its device."""
    if isinstance(value, tuple):
        return tuple(map(_setting_key, value))
    return repr(value) if type(value) in (bool, int, float, str, type(None)) else id(value)


def _implementation(optimizer: Optimizer) -> str:
    """How torch writes the update, as `torch.optim` decides it where nothing is asked for."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if "foreach" not in group:
        return ""
    if group["foreach"] is not None:
        return "foreach" if group["foreach"] else "forloop"
    on_cpu = any(value.device.type == "cpu" for value in group["params"])
    return "forloop" if on_cpu or group.get("differentiable") else "foreach"


class ClosurePhases:
    """Puts what a closure does into phases of its own.

    Args:
        mine: whether the thread is watched.
        making: the phase in which batches are made.
        called: is told of each call.
    """

    def __init__(
        self, mine: Callable[[], bool], timeline: Timeline, making: Callable[[], Phase], called: Callable[[], None]
    ) -> None:
        self._timeline, self._batch_phase, self._called = timeline, making, called
        self._wrap = with_callbacks(mine, self._began, self._ended)

    def wrap_closure(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """What an optimizer's `step` gets in place of its arguments; None for these themselves."""
        optimizer, *given = args
        if given and callable(given[0]):
            return (optimizer, self._wrap(given[0]), *given[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._wrap(kwargs["closure"])}
        return None

    def _began(self, args: tuple, kwargs: dict) -> None:
        self._called()
        self._timeline.enter(self._batch_phase())

    def _ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._timeline.leave()
