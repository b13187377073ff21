"""What a loop does again and again that costs more than it gives, as seen from the graphs that autograd builds.

A mark lies in the metadata of a graph's node and so lives exactly as long as the node. Nothing else of the graph is kept.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.patches import Patches
from hotloop.profiler.autograd.backward_walk import BackwardWalks, walk
from hotloop.profiler.autograd.dropped_gradients import CLEARED, UNREAD, ClearedGradients, RetainedGraphs, match_lines
from hotloop.profiler.autograd.probes import anomaly_mode_us, create_graph_us, operator_us, traceback_lines
from hotloop.profiler.autograd.repeated_forwards import Forward, Mark, inputs_of, is_eval, is_repeat, own_line, repeats
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.tensor_facts import tensor_fingerprints, tensors_in
from hotloop.profiler.base.transparency import RecursionHeadroom
from hotloop.profiler.hooks.distribution_checks import ARGUMENT_VALIDATION as VALIDATION
from hotloop.profiler.hooks.distribution_checks import ValidationTimer
from hotloop.profiler.hooks.forward_calls import CallInputs
from hotloop.profiler.hooks.torch_hooks import stop_on_error, with_callbacks

_FORWARD, _RETAINED, _LOSS = "hotloop forward", "hotloop retained", "hotloop loss"
_LATE_PREFIX = "late "
"""Before what can only be told of a step by the one before."""

_CARRIED_NAMES = {"kept graph": "carried graph"}
"""What is called another way if backwards go through it."""

_MAX_AGE = 2
"""Steps after which a loss should be gone."""

_MAX_EVAL = 50


class AutogradPatterns:
    """Looks at the graphs of a few steps.

    Args:
        fail: is told of an error of its own in the midst of the script's evaluation.
        parameters: gives those of all optimizers that have stepped.
        mine: whether this thread is watched.

    Attributes:
        trained_on: what the networks were given whose graphs the backwards of a step went through.
        evaluated_at: lines that asked a network that was put into evaluation mode, and how often.
    """

    def __init__(
        self,
        sites: CallSites,
        fail: Callable[[Exception], Any],
        parameters: Callable[[], Iterable[Tensor]] = tuple,
        mine: Callable[[], bool] = lambda: True,
    ) -> None:
        self.fail, self._sites, self._on = fail, sites, False
        self._step = self._backwards = 0
        self._observed: list[int] = []
        self._followed: list[int] = []
        self._same = 0
        self._first_node = 0
        self._forwards: list[Forward] = []
        self._ungraded: list[Forward] = []
        self._before: list[Forward] | None = None
        self._retained: list[Mark] = []
        self._created: tuple[str, int] | None = None
        self._losses: list[tuple[int, str, weakref.ref[Mark]]] = []
        self._walks, self._asked = BackwardWalks(parameters), -1
        self._cleared = ClearedGradients(parameters)
        self._trained_s: dict[int, float] = {}
        self._remembered = 0
        self._profiled: list[tuple[int, float]] = []
        self._found: defaultdict[tuple[Any, str], Counter[int]] = defaultdict(Counter)
        self._seconds: defaultdict[tuple[Any, str], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._validations = ValidationTimer(sites, mine, self._note_validation)
        self._retained_graphs, self._keepers = RetainedGraphs(sites, fail), Counter[str]()
        self._evaluating, self._headroom = Patches(), RecursionHeadroom()
        self._graded: list[Mark] = []
        self._evaluated = self._depth = 0
        self.trained_on: list[CallInputs] = []
        self.evaluated_at = Counter[str]()

    @property
    def on(self) -> bool:
        """Whether the step that is on is looked at."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        self._on = on
        self._validations.listen() if on else self._validations.stop()
        if on and any(what == "kept graph" for what, _ in self._found):
            self._retained_graphs.listen(self._step)
        else:
            self._retained_graphs.stop()

    def forward(
        self,
        args: tuple,
        kwargs: dict,
        result: Any,
        seconds: float,
        lines: tuple[str, ...],
        given: CallInputs,
    ) -> None:
        """An outermost forward is done; the first argument is the module. For the rest see `Forward`."""
        mark = Mark(lines[0], self._step, seconds)
        nodes: list[Any] = [value.grad_fn for value in tensors_in(result) if value.grad_fn is not None]
        inputs = tensor_fingerprints(args[1:], kwargs)
        one = Forward(id(args[0]), mark, lines, inputs, bool(nodes), args[0].training, given)
        if nodes and next(args[0].parameters(), None) is not None:
            one.outputs = any(value.requires_grad for value in tensors_in(args[1:])), tensor_fingerprints(result)
        for node in nodes:
            node.metadata[_FORWARD] = mark
        if nodes:
            self._forwards.append(one)
        elif not torch.is_grad_enabled():
            self._ungraded.append(one)

    def backward(self, args: tuple, where: str, updates: int = 0) -> None:
        """A backward begins, with the arguments of `torch.autograd._engine_run_backward`, after so many updates."""
        creates, asks = (len(args) > at and bool(args[at]) for at in (3, 4))  # a graph; for some gradients alone
        retained = len(args) > 3 and bool(args[2]) and not creates
        mark, loss = Mark(where, self._step, updates=updates), Mark(where, self._step)
        roots: list[Any] = [
            value.grad_fn for value in args[0] if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        nodes, again = list(walk(roots)), []
        self._remembered = sum(map(traceback_lines, nodes))
        for node in nodes:
            seen = node.metadata
            for kind in (_FORWARD, _RETAINED):
                if kind in seen:
                    seen[kind].is_walked = True
            before = seen.get(_RETAINED)
            if before is not None and (before.step, before.updates) == (self._step, updates):
                again.append(node)
            if retained and node.next_functions:
                seen[_RETAINED] = mark
            if self._is_new(node):  # alive as long as any part of the graph is: a term of the loss, an output
                seen[_LOSS] = loss
        self._find_needless_work(nodes, again, where, asks=asks or creates)
        self._created = (
            (where, self._walks.latest_nodes) if creates else None
        )  # if the step's last one, nobody goes through it
        if retained:
            self._retained.append(mark)
        self._losses.append((self._step, where, weakref.ref(loss)))

    def backward_over(self) -> None:
        """The outermost backward has ended."""
        self._cleared.ended()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        if self._on:
            self._cleared.optimizer_stepped(value for group in optimizer.param_groups for value in group["params"])

    def _find_needless_work(self, nodes: list[Any], again: list[Any], where: str, *, asks: bool) -> None:
        """What a backward goes through that it needn't; `asks` says whether it gives gradients rather than adding to them."""
        older = sum(bool(node.next_functions) and not self._is_new(node) for node in nodes)
        self._walks.record(nodes, where, self._step, older)
        if asks:
            self._asked = self._step
            self._cleared.asked()
            return
        found = [
            *self._walks.find_shared_graph(again, where, self._step),
            *self._walks.find_unused_gradients(nodes, _forward_of, where, self._step),
            *self._cleared.record(nodes, where, self._step, _forward_of),
        ]
        for one in found:
            if one.what != "input gradients" or self._asked != self._step:
                self._found[one.what, one.where][self._step] += one.amount

    def _is_new(self, node: Any) -> bool:
        """Whether a node was made in this step; what was made before may be shared by all, and parameters are."""
        return bool(node.next_functions) and node._sequence_nr() >= self._first_node

    def step_done(self, *, usual: bool = True) -> None:
        """A step has ended; one that was not like the others is none of which habits are told."""
        self.on = self.on and usual
        self._cleared.step_done(self._step)
        if self.on or self._losses or self._retained or self._before is not None:
            self._review_step()
        self._step += 1
        self._first_node = torch._C._autograd._get_sequence_nr()

    def _review_step(self) -> None:
        """What has become of the graphs of this step and of those before it."""
        if self.on:
            self._observed.append(self._step)
            trained = [one for one in self._forwards if one.mark.is_walked]
            known = [*trained, *(self._before or ())]
            if self._before is not None:
                self._followed.append(self._step)
                given = inputs_of(trained)
                self._same += bool(given) and given == inputs_of(self._before)
            for one in self._forwards + self._ungraded:
                if not one.mark.is_walked and (what := self._name_unused_forward(one, trained)):
                    one.mark.where = own_line(one, known)
                    self._count(what, [one.mark])
            for one, first in repeats(trained):
                one.mark.where = own_line(one, [first])
                self._count("repeated forward", [one.mark])
            if self._created is not None:
                where, nodes = self._created
                self._count("created graph", [Mark(where, self._step, nodes * create_graph_us() / 1e6)])
            self.trained_on = [one.given for one in trained if one.given is not None] or self.trained_on
            self._trained_s[self._step] = sum([one.mark.seconds for one in trained])
            self._before = trained
        else:
            self._before = None
        self._forwards, self._ungraded, self._created = [], [], None
        old = [mark for mark in self._retained if mark.step < self._step]
        self._count("retained graph", (mark for mark in old if not mark.is_walked))
        self._retained = [mark for mark in self._retained if mark.step >= self._step]
        for step, where, _ in (one for one in self._losses if one[0] == self._step - _MAX_AGE and one[2]() is not None):
            self._found["kept graph", where][step] += 1
        self._keepers.update(self._retained_graphs.live_lines(self._step - _MAX_AGE))
        self._losses = [loss for loss in self._losses if loss[0] > self._step - _MAX_AGE]

    def _name_unused_forward(self, one: Forward, trained: Sequence[Forward]) -> str:
        """What a forward is called that no backward went through; what comes after the update counts with the next step."""
        if not one.has_graph:
            if is_eval(one, trained):
                return "evaluation"
            return _LATE_PREFIX + "evaluation" if is_repeat(one, self._before or ()) else ""
        if not one.training and is_eval(one, trained):
            return "evaluation"
        if is_repeat(one, trained):
            return "wasted forward"
        if not any(one.module == other.module for other in trained):
            return "unused graph"
        if self._before is None:
            return ""
        return _LATE_PREFIX + ("wasted forward" if is_repeat(one, self._before) else "unused graph")

    def _count(self, what: str, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._found[what, mark.where][mark.step] += 1
            self._seconds[what, mark.where][mark.step] += mark.seconds

    def note_modes(self, where: str) -> None:
        """A backward begins: notes what is on that costs time in every operation, for it alone or all the time."""
        self._backwards += 1
        if torch.is_anomaly_enabled():
            self._found["hook", where][self._backwards] += 1
            self._seconds["hook", where][self._backwards] += self._remembered * anomaly_mode_us() / 1e6
        if torch.autograd.profiler._is_profiler_enabled:
            self._found["profiler", where][self._backwards] += 1
            made = 2 * self._walks.latest_nodes  # each node is made by an operator, and runs one
            self._profiled.append((made, operator_us()))

    def _note_validation(self, where: str, seconds: float) -> None:
        """Arguments of a distribution were validated."""
        self._count(VALIDATION, [Mark(where, self._step, seconds)])

    def note_recomputation(self, seconds: float, where: str) -> None:
        """A backward has called a forward again."""
        if self.on:
            self._found["recomputed forward", where][self._step] += 1
            self._seconds["recomputed forward", where][self._step] += seconds

    def begin_evaluation(self) -> None:
        """The network was put into evaluation mode: are graphs built for it?"""
        self._headroom.make()
        self._evaluating.patch(
            nn.Module, "__call__", with_callbacks(lambda: self._evaluated < _MAX_EVAL, self._enter, self._leave)
        )

    def end_evaluation(self) -> None:
        self._evaluating.undo()
        self._headroom.give_back()
        self._depth = 0

    def remove(self) -> None:
        """Takes away all that is installed."""
        self.end_evaluation()
        self.on = False

    @stop_on_error
    def _enter(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.perf_counter()

    @stop_on_error
    def _leave(self, began: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._evaluated += 1
        nodes: list[Any] = [value.grad_fn for value in tensors_in(result) if value.grad_fn is not None]
        if args[0].training:
            return
        where = self._sites.caller_line(3)
        self.evaluated_at[where] += 1
        if not nodes:
            return
        mark = Mark(where, self._step, time.perf_counter() - began)
        self._graded.append(mark)
        for node in nodes:  # a backward that comes later, as for the gradient of an input, is heard by the graph alone
            node.register_prehook(partial(_mark_walked, mark))

    @property
    def has_one_batch(self) -> bool:
        """Whether the network was trained on what it was in the step before, each time."""
        return bool(self._followed) and self._same == len(self._followed)

    def records(self) -> list[dict[str, Any]]:
        """As `profiles.Habit`: what happens in more than half of the steps that were looked at.

        A validation of many batches that one of them holds is none of every step; evaluation with graphs is told anyway.
        Of what a backward goes through that it needn't, and of forwards that are repeated, the part of it is given.
        """
        steps: dict[str, Sequence[int]] = {
            "hook": range(1, self._backwards + 1),
            "profiler": range(1, self._backwards + 1),
            "kept graph": [step for step in self._observed if step < self._step - _MAX_AGE],
            "unused gradients": self._observed[1:],  # the first tells what a parameter was before
            CLEARED: self._followed or self._observed,  # what a step leaves is cleared in the one after it
            UNREAD: self._followed or self._observed,
        }
        found, keepers = [], match_lines([where for what, where in self._found if what == "kept graph"], self._keepers)
        for (what, where), counts in self._found.items():
            over = steps.get(what, self._followed if what.startswith(_LATE_PREFIX) else self._observed)
            seconds = self._seconds[what, where]
            found.append(_pattern(what, where, _median_amount(counts, over), _median_amount(seconds, over)))
            if what == "profiler":
                found[-1] |= {"calls": _median_at(self._profiled, 0), "call_us": _median_at(self._profiled, 1)}
            if part := self._part(what, where, seconds):
                found[-1] |= {"what": _CARRIED_NAMES.get(what, what), "part": part}
            elif what == "kept graph":
                found[-1]["where"] = keepers.get(where, where)
        return [habit for habit in found if habit["per_step"]] + self._evaluations_with_graphs()

    def _part(self, what: str, where: str, seconds: Mapping[int, float]) -> float:
        """Of the backward, that which goes with a habit; backwards take as their forwards do."""
        if what in (CLEARED, UNREAD):
            return self._cleared.dropped_share(what, where)
        if what != "repeated forward":
            return self._walks.needless_share(what, where)
        trained_s = sum(self._trained_s[step] for step in seconds)
        return sum(seconds.values()) / trained_s if trained_s else 0.0

    def _evaluations_with_graphs(self) -> list[dict[str, Any]]:
        """Evaluations that built graphs nobody went through, in all steps."""
        vain = [mark for mark in self._graded if not mark.is_walked]
        over = max(1, self._step)
        return [
            _pattern("autograd in evaluation", where, len(marks) / over, sum(mark.seconds for mark in marks) / over)
            for where in dict.fromkeys(mark.where for mark in vain)
            for marks in [[mark for mark in vain if mark.where == where]]
        ]


def _pattern(what: str, where: str, per_step: float, seconds: float) -> dict[str, Any]:
    ms = seconds * 1e3 if seconds else None
    return {"what": what.removeprefix(_LATE_PREFIX), "where": where, "per_step": per_step, "ms": ms}


def _median_at(pairs: Sequence[tuple[float, float]], at: int) -> float:
    return median(pair[at] for pair in pairs)


def _median_amount(amounts: Mapping[int, float], steps: Sequence[int]) -> float:
    """The middle one of the amounts in some steps, the lower one of two."""
    return float(median_low([amounts.get(step, 0) for step in steps])) if steps else 0.0


def _mark_walked(mark: Mark, gradients: Any) -> None:
    mark.is_walked = True


def _forward_of(node: Any) -> str:
    """The line of the forward that a node ended; empty if it ended none."""
    mark = node.metadata.get(_FORWARD)
    return mark.where if mark is not None else ""
