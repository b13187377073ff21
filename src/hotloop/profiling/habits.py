"""What a loop does again and again that costs more than it gives, as seen from the graphs that autograd builds.

A mark lies in the metadata of a graph's node and so lives exactly as long as the node. Nothing else of the graph is kept.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.patches import Patches
from hotloop.profiling.hooks import around
from hotloop.profiling.sites import Sites

_FORWARD, _RETAINED, _LOSS = "hotloop forward", "hotloop retained", "hotloop loss"
_MOST_NODES = 20_000
_LATER = 2
"""Steps after which a loss should be gone."""

_MOST_EVALUATED = 50


@dataclass
class Mark:
    """Of a forward or backward, in the graph.

    Attributes:
        step: in which it happened.
        walked: whether another backward came by.
    """

    where: str
    step: int
    seconds: float = 0.0
    walked: bool = False


class Graphs:
    """Looks at the graphs of a few steps.

    Attributes:
        on: whether the step that is on is looked at.
    """

    def __init__(self, sites: Sites) -> None:
        self.on = False
        self._sites = sites
        self._step = self._looked = 0
        self._forwards: list[Mark] = []
        self._ungraded: list[tuple[int, Mark]] = []
        self._trained: set[int] = set()
        self._retained: list[Mark] = []
        self._losses: list[tuple[int, str, weakref.ref[Mark]]] = []
        self._found: Counter[tuple[Any, str]] = Counter()
        self._seconds: defaultdict[tuple[Any, str], float] = defaultdict(float)
        self._evaluating = Patches()
        self._evaluated = self._depth = 0

    def forward(self, module: nn.Module, result: Any, seconds: float, where: str) -> None:
        """An outermost forward is done."""
        mark = Mark(where, self._step, seconds)
        nodes: list[Any] = [value.grad_fn for value in _tensors(result) if value.grad_fn is not None]
        for node in nodes:
            node.metadata[_FORWARD] = mark
        if nodes:
            self._forwards.append(mark)
            self._trained.add(id(module))
        elif not torch.is_grad_enabled():
            self._ungraded.append((id(module), mark))

    def backward(self, args: tuple, where: str) -> None:
        """A backward begins, with the arguments of `torch.autograd._engine_run_backward`."""
        retained = len(args) > 3 and bool(args[2]) and not args[3]
        mark = Mark(where, self._step)
        roots: list[Any] = [
            value.grad_fn for value in args[0] if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        for node in _walk(roots):
            seen = node.metadata
            for kind in (_FORWARD, _RETAINED):
                if kind in seen:
                    seen[kind].walked = True
            if retained and node.next_functions:
                seen[_RETAINED] = mark
        if retained:
            self._retained.append(mark)
        for node in roots:
            loss = Mark(where, self._step)
            node.metadata[_LOSS] = loss
            self._losses.append((self._step, where, weakref.ref(loss)))

    def step_done(self) -> None:
        """A step has ended."""
        if self.on or self._losses or self._retained:
            self._look_back()
        self._step += 1

    def _look_back(self) -> None:
        """What has become of the graphs of this step and of those before it."""
        if self.on:
            self._looked += 1
            self._count("wasted forward", (mark for mark in self._forwards if not mark.walked))
            # Of a network that isn't trained here, such as a teacher, it is a part of the training.
            self._count("evaluation", (mark for module, mark in self._ungraded if module in self._trained))
        self._forwards, self._ungraded, self._trained = [], [], set()
        old = [mark for mark in self._retained if mark.step < self._step]
        self._count("retained graph", (mark for mark in old if not mark.walked))
        self._retained = [mark for mark in self._retained if mark.step >= self._step]
        for _, where, _ in (loss for loss in self._losses if loss[0] == self._step - _LATER and loss[2]() is not None):
            self._found["kept graph", where] += 1
        self._losses = [loss for loss in self._losses if loss[0] > self._step - _LATER]

    def _count(self, what: str, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._found[what, mark.where] += 1
            self._seconds[what, mark.where] += mark.seconds

    def look_around(self, where: str) -> None:
        """Notes what is left on that costs time in every operation."""
        if torch.is_anomaly_enabled():
            self._found["hook", where] += 1

    def begin_evaluation(self) -> None:
        """The network was put into evaluation mode: are graphs built for it?"""
        self._evaluating.put(nn.Module, "__call__", around(self._few, self._enter, self._leave))

    def end_evaluation(self) -> None:
        self._evaluating.undo()
        self._depth = 0

    def _few(self) -> bool:
        return self._evaluated < _MOST_EVALUATED

    def _enter(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.perf_counter()

    def _leave(self, began: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._evaluated += 1
        if not args[0].training and any(value.requires_grad for value in _tensors(result)):
            where = self._sites.caller(3)
            self._found["autograd in evaluation", where] += 1
            self._seconds["autograd in evaluation", where] += time.perf_counter() - began

    def records(self) -> list[dict[str, Any]]:
        """As `profiles.Habit`."""
        steps = {"retained graph": max(1, self._looked), "autograd in evaluation": max(1, self._step)}
        found = []
        for (what, where), count in self._found.items():
            over = steps.get(what, max(1, self._looked))
            spent = self._seconds[what, where]
            found.append(
                {"what": what, "where": where, "per_step": count / over, "ms": spent * 1e3 / over if spent else None}
            )
        return found


def _walk(roots: list[Any]) -> Iterator[Any]:
    """The nodes of a graph, from its outputs on."""
    seen, ahead = set(roots), deque(roots)
    while ahead and len(seen) < _MOST_NODES:
        node = ahead.popleft()
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                ahead.append(after)


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth - 1)
    elif depth and hasattr(value, "values"):
        for part in value.values():
            yield from _tensors(part, depth - 1)


def is_loss(module: nn.Module) -> bool:
    """Whether a module called by the loop itself says how wrong a result is."""
    if isinstance(module, nn.modules.loss._Loss):
        return True
    name = type(module).__name__.lower()
    return ("loss" in name or "criterion" in name) and next(module.parameters(), None) is None
