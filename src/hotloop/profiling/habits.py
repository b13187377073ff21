"""What a loop does again and again that costs more than it gives, as seen from the graphs that autograd builds.

A mark lies in the metadata of a graph's node and so lives exactly as long as the node. Nothing else of the graph is kept.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.patches import Patches
from hotloop.profiling.hooks import around, safe
from hotloop.profiling.room import Room
from hotloop.profiling.sites import Sites

_FORWARD, _RETAINED, _LOSS = "hotloop forward", "hotloop retained", "hotloop loss"
_AFTERWARDS = "late "
"""Before what can only be told of a step by the one before."""

_MOST_NODES = 20_000
_LATER = 2
"""Steps after which a loss should be gone."""

_MOST_EVALUATED = 50
_NUMBERS = 64
"""Of a tensor, by which it is told from others."""


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


@dataclass
class _Forward:
    """An outermost forward.

    Attributes:
        lines: of the user's that called it, from inside out.
        inputs: which tensors it got, see `_inputs_of`.
        graded: whether it built a graph.
        training: whether the module was in training mode.
        rows: samples in the inputs, as far as that is known.
        drawn: whether a loader gave something since the forward before.
    """

    module: int
    mark: Mark
    lines: tuple[str, ...]
    inputs: frozenset[tuple]
    graded: bool
    training: bool
    rows: int | None = None
    drawn: bool = False


class Graphs:
    """Looks at the graphs of a few steps.

    Args:
        fail: is told of an error of its own in the midst of the script's evaluation.

    Attributes:
        on: whether the step that is on is looked at.
    """

    def __init__(self, sites: Sites, fail: Callable[[Exception], Any]) -> None:
        self.on, self.fail = False, fail
        self._sites = sites
        self._step = self._around = 0
        self._looked: list[int] = []
        self._followed: list[int] = []
        self._same = 0
        self._first_node = 0
        self._forwards: list[_Forward] = []
        self._ungraded: list[_Forward] = []
        self._before: list[_Forward] | None = None
        self._retained: list[Mark] = []
        self._losses: list[tuple[int, str, weakref.ref[Mark]]] = []
        self._walks: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._found: defaultdict[tuple[Any, str], Counter[int]] = defaultdict(Counter)
        self._seconds: defaultdict[tuple[Any, str], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._evaluating, self._room = Patches(), Room()
        self._graded: list[Mark] = []
        self._evaluated = self._depth = 0

    def forward(
        self,
        args: tuple,
        kwargs: dict,
        result: Any,
        seconds: float,
        lines: tuple[str, ...],
        *,
        rows: int | None = None,
        drawn: bool = False,
    ) -> None:
        """An outermost forward is done; the first argument is the module. For the rest see `_Forward`."""
        mark = Mark(lines[0], self._step, seconds)
        nodes: list[Any] = [value.grad_fn for value in _tensors(result) if value.grad_fn is not None]
        inputs = _inputs_of(args[1:], kwargs)
        one = _Forward(id(args[0]), mark, lines, inputs, bool(nodes), args[0].training, rows, drawn)
        for node in nodes:
            node.metadata[_FORWARD] = mark
        if nodes:
            self._forwards.append(one)
        elif not torch.is_grad_enabled():
            self._ungraded.append(one)

    def backward(self, args: tuple, where: str) -> None:
        """A backward begins, with the arguments of `torch.autograd._engine_run_backward`."""
        retained = len(args) > 3 and bool(args[2]) and not args[3]
        mark = Mark(where, self._step)
        roots: list[Any] = [
            value.grad_fn for value in args[0] if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        loss, made = Mark(where, self._step), Counter[bool]()
        for node in _walk(roots):
            seen = node.metadata
            for kind in (_FORWARD, _RETAINED):
                if kind in seen:
                    seen[kind].walked = True
            if retained and node.next_functions:
                seen[_RETAINED] = mark
            if self._is_new(node):  # alive as long as any part of the graph is: a term of the loss, an output
                seen[_LOSS] = loss
            if node.next_functions:
                made[self._is_new(node)] += 1
        self._walks[where].append((made[False], made.total()))
        if retained:
            self._retained.append(mark)
        self._losses.append((self._step, where, weakref.ref(loss)))

    def _is_new(self, node: Any) -> bool:
        """Whether a node was made in this step; what was made before may be shared by all, and parameters are."""
        return bool(node.next_functions) and node._sequence_nr() >= self._first_node

    def step_done(self, *, usual: bool = True) -> None:
        """A step has ended; one that was not like the others is none of which habits are told."""
        self.on = self.on and usual
        if self.on or self._losses or self._retained or self._before is not None:
            self._look_back()
        self._step += 1
        self._first_node = torch._C._autograd._get_sequence_nr()

    def _look_back(self) -> None:
        """What has become of the graphs of this step and of those before it."""
        if self.on:
            self._looked.append(self._step)
            trained = [one for one in self._forwards if one.mark.walked]
            known = [*trained, *(self._before or ())]
            if self._before is not None:
                self._followed.append(self._step)
                given = _given(trained)
                self._same += bool(given) and given == _given(self._before)
            for one in self._forwards + self._ungraded:
                if not one.mark.walked and (what := self._in_vain(one, trained)):
                    one.mark.where = _apart(one, known)
                    self._count(what, [one.mark])
            self._before = trained
        else:
            self._before = None
        self._forwards, self._ungraded = [], []
        old = [mark for mark in self._retained if mark.step < self._step]
        self._count("retained graph", (mark for mark in old if not mark.walked))
        self._retained = [mark for mark in self._retained if mark.step >= self._step]
        for step, where, _ in (one for one in self._losses if one[0] == self._step - _LATER and one[2]() is not None):
            self._found["kept graph", where][step] += 1
        self._losses = [loss for loss in self._losses if loss[0] > self._step - _LATER]

    def _in_vain(self, one: _Forward, trained: Sequence[_Forward]) -> str:
        """What a forward is called that no backward went through; what comes after the update counts with the next step."""
        if not one.graded:
            if _evaluates(one, trained):
                return "evaluation"
            return _AFTERWARDS + "evaluation" if _is_again(one, self._before or ()) else ""
        if _is_again(one, trained):
            return "wasted forward"
        if not any(one.module == other.module for other in trained):
            return "unused graph"
        if self._before is None:
            return ""
        return _AFTERWARDS + ("wasted forward" if _is_again(one, self._before) else "unused graph")

    def _count(self, what: str, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._found[what, mark.where][mark.step] += 1
            self._seconds[what, mark.where][mark.step] += mark.seconds

    def look_around(self, where: str) -> None:
        """A backward begins: notes what is on that costs time in every operation, for it alone or all the time."""
        self._around += 1
        if torch.is_anomaly_enabled():
            self._found["hook", where][self._around] += 1

    def begin_evaluation(self) -> None:
        """The network was put into evaluation mode: are graphs built for it?"""
        self._room.make()
        self._evaluating.put(nn.Module, "__call__", around(self._few, self._enter, self._leave))

    def end_evaluation(self) -> None:
        self._evaluating.undo()
        self._room.give_back()
        self._depth = 0

    def _few(self) -> bool:
        return self._evaluated < _MOST_EVALUATED

    @safe
    def _enter(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.perf_counter()

    @safe
    def _leave(self, began: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._evaluated += 1
        nodes: list[Any] = [value.grad_fn for value in _tensors(result) if value.grad_fn is not None]
        if args[0].training or not nodes:
            return
        mark = Mark(self._sites.caller(3), self._step, time.perf_counter() - began)
        self._graded.append(mark)
        for node in nodes:  # a backward that comes later, as for the gradient of an input, is heard by the graph alone
            node.register_prehook(partial(_walked, mark))

    @property
    def one_batch(self) -> bool:
        """Whether the network was trained on what it was in the step before, each time."""
        return bool(self._followed) and self._same == len(self._followed)

    def records(self) -> list[dict[str, Any]]:
        """As `profiles.Habit`: what happens in more than half of the steps that were looked at.

        A validation of many batches that one of them holds is none of every step; evaluation with graphs is told anyway.
        Of a carried graph its part of the backward is given.
        """
        steps: dict[str, Sequence[int]] = {
            "hook": range(1, self._around + 1),
            "kept graph": [step for step in self._looked if step < self._step - _LATER],
        }
        found = []
        for (what, where), counts in self._found.items():
            over = steps.get(what, self._followed if what.startswith(_AFTERWARDS) else self._looked)
            seconds = self._seconds[what, where]
            found.append(_habit(what, where, _usual(counts, over), _usual(seconds, over)))
            if what == "kept graph" and (part := _carried(self._walks[where])):
                found[-1] |= {"what": "carried graph", "part": part}
        return [habit for habit in found if habit["per_step"]] + self._with_graphs()

    def _with_graphs(self) -> list[dict[str, Any]]:
        """Evaluations that built graphs nobody went through, in all steps."""
        vain = [mark for mark in self._graded if not mark.walked]
        over = max(1, self._step)
        return [
            _habit("autograd in evaluation", where, len(marks) / over, sum(mark.seconds for mark in marks) / over)
            for where in dict.fromkeys(mark.where for mark in vain)
            for marks in [[mark for mark in vain if mark.where == where]]
        ]


def _habit(what: str, where: str, per_step: float, seconds: float) -> dict[str, Any]:
    ms = seconds * 1e3 if seconds else None
    return {"what": what.removeprefix(_AFTERWARDS), "where": where, "per_step": per_step, "ms": ms}


def _carried(walks: Sequence[tuple[int, int]]) -> float:
    """The part of backwards' nodes that earlier steps made, given both numbers, if these become more; else 0."""
    earlier, walked = (sum(numbers) for numbers in zip(*walks, strict=True))
    return earlier / walked if walks[-1][0] > walks[0][0] else 0.0


def _usual(amounts: Mapping[int, float], steps: Sequence[int]) -> float:
    """The middle one of the amounts in some steps, the lower one of two."""
    return float(median_low([amounts.get(step, 0) for step in steps])) if steps else 0.0


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


def _walked(mark: Mark, gradients: Any) -> None:
    mark.walked = True


def _evaluates(one: _Forward, trained: Sequence[_Forward]) -> bool:
    """Whether a forward without gradients only looks at how good the network is that is trained here.

    What a network in training mode is asked about other samples may well be a part of the training: targets, actions,
    labels for what has none. So may what it is asked about fewer samples than it is trained on, if no loader gave them.
    """
    if not one.training:
        same = [other for other in trained if other.module == one.module and other.training]
        return any(one.drawn or (one.rows or 1) >= (other.rows or 1) for other in same)
    return _is_again(one, trained)


def _is_again(one: _Forward, trained: Sequence[_Forward]) -> bool:
    """Whether the same network was trained on the same inputs."""
    return bool(one.inputs) and any(other.module == one.module and other.inputs == one.inputs for other in trained)


def _given(trained: Sequence[_Forward]) -> set[tuple]:
    return {(one.module, one.inputs) for one in trained if one.inputs}


def _apart(one: _Forward, known: Sequence[_Forward]) -> str:
    """The line that tells a forward from those that the training needs; many may go through one function."""
    others = [other.lines for other in known if other.module == one.module and other.lines[0] == one.lines[0]]
    differing = (
        (here for here, there in zip(one.lines, others[0], strict=False) if here != there) if others else iter(())
    )
    return next(differing, one.lines[0])


def _inputs_of(args: tuple, kwargs: dict) -> frozenset[tuple]:
    """By what the same inputs are known when they are given again, be it in a copy: shapes, sums and some numbers."""
    return frozenset(_known_by(value) for value in (*_tensors(args), *_tensors(kwargs)))


def _known_by(value: Tensor) -> tuple:
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its numbers may lie elsewhere
        return value.shape, id(value)
    try:
        with torch._C._DisableTorchDispatch():  # the script's modes hear nothing
            few = value.detach().reshape(-1)[:: max(1, value.numel() // _NUMBERS)]
            return value.shape, value.detach().sum().item(), *few.tolist()
    except RuntimeError:  # there are no numbers to look at, as under torch.func
        return value.shape, id(value)


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, depth - 1)
    elif depth:
        held = (part for part in _attributes(value) if isinstance(part, Tensor | list | tuple | Mapping))
        for part in held:  # not objects in objects, which may lead anywhere
            yield from _tensors(part, depth - 1)


def _attributes(value: Any) -> Iterable[Any]:
    """What an object holds, as a batch that is one; nothing is called for it. Modules and classes hold no batch."""
    if isinstance(value, nn.Module | type | ModuleType):
        return ()
    with suppress(AttributeError):  # it may have slots alone
        return object.__getattribute__(value, "__dict__").values()
    slots = getattr(type(value), "__slots__", ())
    return [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]


def has_gradient(result: Any) -> bool | None:
    """Whether a backward can come back to what made a result; None where there are no tensors to be seen in it."""
    found = [value.requires_grad for value in _tensors(result)]
    return any(found) if found else None


def is_loss(module: nn.Module) -> bool:
    """Whether a module called by the loop itself says how wrong a result is."""
    if isinstance(module, nn.modules.loss._Loss):
        return True
    name = type(module).__name__.lower()
    return ("loss" in name or "criterion" in name) and next(module.parameters(), None) is None
