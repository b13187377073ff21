"""Optimizers, as they were used."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop.profiling.groups import GroupClock
from hotloop.profiling.sites import Sites

_MOST = 20


class _Used:
    """What is known of one optimizer."""

    def __init__(self, optimizer: Optimizer, number: int, where: str) -> None:
        self.optimizer, self.number, self.where = weakref.ref(optimizer), number, where
        self.kind, self.implementation = type(optimizer).__name__, _implementation(optimizer)
        self.groups = [_group(group, number) for number, group in enumerate(optimizer.param_groups)]
        self.spent: list[float] = []
        self.by_group: dict[int, list[float]] = {}


class Optimizers:
    """Times updates in the steps that are on.

    Attributes:
        on: whether updates are timed.
        nests: whether one was seen inside another.
        inside: how many updates are under way, one inside another.
    """

    def __init__(self, sites: Sites) -> None:
        self.on = self.nests = False
        self._sites = sites
        self._used: list[_Used] = []
        self._open: list[tuple[int, float]] = []
        self._nested = 0.0
        self._groups = GroupClock()

    @property
    def inside(self) -> bool:
        return bool(self._open)

    def began(self, optimizer: Optimizer) -> None:
        if self._open and self._open[0][0] == id(optimizer):
            self._open = []  # it can't be inside itself: the last one was left by an error
        self._open.append((id(optimizer), time.perf_counter()))
        if len(self._open) == 1:
            self._nested = 0.0
            if self.on:
                self._groups.begin(optimizer)

    def ended(self, optimizer: Optimizer) -> bool:
        """Whether it was the outermost."""
        if not self._open:
            return True
        began = self._open.pop()[1]
        if self._open:
            self.nests = True
            return False
        used, by_group = self._known(optimizer), self._groups.end(optimizer)
        if self.on and used is not None:
            used.spent.append(time.perf_counter() - began - self._nested)
            for number, seconds in by_group.items():
                used.by_group.setdefault(number, []).append(seconds)
        return True

    def forget(self) -> None:
        """What they took and where is forgotten; their numbers stay, since steps are told by them."""
        self.on = False
        for used in self._used:
            used.where, used.spent, used.by_group = "", [], {}

    def nested(self, seconds: float) -> None:
        """A forward or backward that a closure ran inside of an update is not its own time."""
        if self._open:
            self._nested += seconds

    def number(self, optimizer: Optimizer, where: str) -> int:
        """By which it is told from others; one that is made anew again and again takes its predecessor's."""
        used = self._known(optimizer)
        if used is None:
            used = next((one for one in self._used if one.where == where and one.optimizer() is None), None)
            if used is not None:
                used.optimizer = weakref.ref(optimizer)
        if used is None and len(self._used) < _MOST:
            used = _Used(optimizer, len(self._used), where)
            self._used.append(used)
        if used is None:
            return -2
        used.where = used.where or where
        return used.number

    def known_as(self, number: int) -> dict[str, str] | None:
        """Its class and line; None of one that was too many to be kept."""
        used = next((used for used in self._used if used.number == number), None)
        return {"kind": used.kind, "where": used.where} if used is not None else None

    def _known(self, optimizer: Optimizer) -> _Used | None:
        return next((used for used in self._used if used.optimizer() is optimizer), None)

    def records(self, steps: int) -> list[dict[str, Any]]:
        """As `profiles.OptimizerUse`."""
        instrumented = max(1, steps // 2)
        return [
            {
                "kind": used.kind,
                "where": used.where,
                "implementation": used.implementation,
                "groups": [
                    {**group, "ms": _per_step(used.by_group.get(number, []), instrumented)}
                    for number, group in enumerate(used.groups)
                ],
                "steps": len(used.spent) / instrumented,
                "ms": _per_step(used.spent, instrumented),
            }
            for used in self._used
            if used.spent
        ]


class Awaited:
    """Whether there is an optimizer that may step yet: its parameters have gradients, and nobody else changes them.

    Optimizers may have been made before anybody watched, and torch keeps no list of them.
    """

    def __init__(self) -> None:
        self._parameter: Tensor | None = None
        self._before: Tensor | None = None

    def still(self) -> bool:
        """Asked again and again, of which the first time takes some 10 ms."""
        if self._parameter is None or self._before is None:
            self._parameter = min(_with_gradients(), key=Tensor.numel, default=None)
            self._before = None if self._parameter is None else self._parameter.detach().clone()
            return self._parameter is not None
        return torch.equal(self._parameter, self._before)


def _with_gradients() -> Iterator[Tensor]:
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
