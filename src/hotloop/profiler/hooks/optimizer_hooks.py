"""Records how training uses optimizers."""

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
    """Times the parameter groups of one update: from the optimizer's access to a group to the next access."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent: dict[int, float] = {}
        self._group: int | None = None
        self._since = 0.0

    def begin(self, optimizer: Optimizer) -> None:
        """Begins an update; replaces the optimizer's list of groups until `end`."""
        self._spent, self._group = {}, None
        compiled = hasattr(optimizer.step, "_torchdynamo_orig_callable")  # recompiles for another list
        if len(optimizer.param_groups) > 1 and not compiled:
            optimizer.param_groups = _TimedGroups(_original_groups(optimizer.param_groups), self._asked)

    def end(self, optimizer: Optimizer) -> dict[int, float]:
        """Returns seconds by group number; empty for one group, or if the optimizer doesn't iterate over groups."""
        self._asked(None)
        optimizer.param_groups = _original_groups(optimizer.param_groups)
        return self._spent

    def _asked(self, group: int | None) -> None:
        now = self._now()
        if self._group is not None:
            self._spent[self._group] = self._spent.get(self._group, 0.0) + now - self._since
        self._group, self._since = group, now


def _original_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's own list, also after an update that raised an error."""
    return groups.groups if isinstance(groups, _TimedGroups) else groups


_NOT_SETTINGS = ("params", "param_names", "name")
"""Keys of a group that have no influence on its update."""


class _OptimizerStats:
    """Records of one optimizer; `latest` refers to the optimizer or its latest replacement."""

    def __init__(self, optimizer: Optimizer, number: int, where: str) -> None:
        self.latest, self.number, self.where = weakref.ref(optimizer), number, where
        self.kind, self.implementation = type(optimizer).__name__, _implementation(optimizer)
        self.groups = [_group(group, number) for number, group in enumerate(optimizer.param_groups)]
        self.settings = [_settings(group) for group in optimizer.param_groups]
        self.spent: list[float] = []
        self.evaluations = self.recreations = 0
        self.by_group: dict[int, list[float]] = {}


class OptimizerRecorder:
    """Times updates while `on`; `has_nested` says whether an update ran inside another."""

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
            self._open = []  # no update nests in itself: an error ended the last one
        self._open.append((id(optimizer), time.perf_counter()))
        if len(self._open) == 1:
            self._nested, self._evaluations = 0.0, 0
            if self.on:
                self._groups.begin(optimizer)

    def ended(self, optimizer: Optimizer) -> bool:
        """Returns whether the update was the outermost."""
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
        if self.on and self._open:
            self._evaluations += 1

    def forget(self) -> None:
        """Discards times and lines; numbers stay, since step flags contain them."""
        self.on = False
        for used in self._used:
            used.where, used.spent, used.by_group, used.evaluations, used.recreations = "", [], {}, 0, 0

    def exclude_time(self, seconds: float) -> None:
        """Excludes a closure's forward or backward from the update's time."""
        if self._open:
            self._nested += seconds

    def number(self, optimizer: Optimizer, where: str) -> int:
        """Returns the number of an optimizer that has just stepped; a recreated optimizer keeps its number."""
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
        return {"kind": self._used[number].kind, "where": self._used[number].where}

    def _known(self, optimizer: Optimizer) -> _OptimizerStats | None:
        used = self._by_id.get(id(optimizer))
        return used if used is not None and used.latest() is optimizer else None

    def parameters(self) -> Iterator[Tensor]:
        alive = (optimizer for used in self._used if (optimizer := used.latest()) is not None)
        return (value for optimizer in alive for group in optimizer.param_groups for value in group["params"])

    def records(self, steps: int) -> list[dict[str, Any]]:
        instrumented, settings = max(1, steps // 2), self._settings()
        return [
            {
                "kind": used.kind,
                "where": used.where,
                "implementation": used.implementation,
                "groups": [
                    group | {"settings": settings[key], "ms": _per_step(used.by_group.get(number, []), instrumented)}
                    for number, (group, key) in enumerate(zip(used.groups, used.settings, strict=True))
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
        distinct = dict.fromkeys(settings for used in self._used for settings in used.settings)
        return {settings: number for number, settings in enumerate(distinct)}


class NextUpdates:
    """Detects an optimizer that may step later: its parameters have gradients, and no other code changes them.

    Optimizers may exist before recording begins, and torch has no list of them.
    """

    def __init__(self) -> None:
        self._parameter: Tensor | None = None
        self._before: Tensor | None = None

    def is_expected(self) -> bool:
        """May be called repeatedly; the first call takes about 10 ms."""
        if self._parameter is None or self._before is None:
            self._parameter = min(_parameters_with_gradients(), key=Tensor.numel, default=None)
            self._before = None if self._parameter is None else self._parameter.detach().clone()
            return self._parameter is not None
        return torch.equal(self._parameter, self._before)


def _parameters_with_gradients() -> Iterator[Tensor]:
    made = (one for one in gc.get_objects() if issubclass(type(one), Optimizer))
    groups = (group for one in made for group in getattr(one, "param_groups", ()))
    return (value for group in groups for value in group["params"] if value.grad is not None)


def _per_step(seconds: list[float], steps: int) -> float | None:
    """Milliseconds per step; None if nothing was timed."""
    return median(seconds) * 1e3 * len(seconds) / steps if seconds else None


def _group(group: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "name": str(group.get("name", number)),
        "tensors": len(group["params"]),
        "numbers": sum(value.numel() for value in group["params"]),
        "ms": None,
    }


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, _setting_key(value)) for name, value in sorted(group.items()) if name not in _NOT_SETTINGS)


def _setting_key(value: Any) -> Any:
    """The value itself, or the object's id: reading a tensor would synchronize with its device."""
    if isinstance(value, tuple):
        return tuple(map(_setting_key, value))
    return repr(value) if type(value) in (bool, int, float, str, type(None)) else id(value)


def _implementation(optimizer: Optimizer) -> str:
    """The implementation of the update, by the rules of `torch.optim` for defaults."""
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
    """Puts a closure's work into phases; `making` returns the batch phase, `called` is notified of each call."""

    def __init__(
        self, mine: Callable[[], bool], timeline: Timeline, making: Callable[[], Phase], called: Callable[[], None]
    ) -> None:
        self._timeline, self._batch_phase, self._called = timeline, making, called
        self._wrap = with_callbacks(mine, self._began, self._ended)

    def wrap_closure(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Returns arguments for the optimizer's `step` with a wrapped closure; None without a closure."""
        optimizer, *rest = args
        if rest and callable(rest[0]):
            return (optimizer, self._wrap(rest[0]), *rest[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._wrap(kwargs["closure"])}
        return None

    def _began(self, args: tuple, kwargs: dict) -> None:
        self._called()
        self._timeline.enter(self._batch_phase())

    def _ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._timeline.leave()
