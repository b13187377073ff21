"""Finds patterns in the use of autograd that cost more than they give, from the graphs of a few steps.

Records are stored in the metadata of graph nodes and so live exactly as long as the nodes. No other reference to the
graph is stored. Repeated forwards, evaluations and checkpoints between steps, argument checks of distributions, and
probes of single costs belong to the patterns.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from hotloop.core.patches import Patches
from hotloop.core.records.profile import TAKE_ROWS
from hotloop.core.torch_private import DisableTorchDispatch, next_sequence_number
from hotloop.profiler.backward_walk import (
    CLEARED,
    UNREAD,
    BackwardWalks,
    ClearedGradients,
    RetainedGraphs,
    match_lines,
    walk,
)
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.steps import StepFact
from hotloop.profiler.base.tensor_facts import tensor_fingerprints, tensors_in
from hotloop.profiler.base.transparency import RecursionHeadroom, hide_from_compiler
from hotloop.profiler.compile_race import CallInputs
from hotloop.profiler.hooks.torch_hooks import stop_on_error, with_callbacks

_FORWARD, _RETAINED, _LOSS = "hotloop forward", "hotloop retained", "hotloop loss"
_LATE_PREFIX = "late "  # prefix of patterns that can only be found from two consecutive steps
_CARRIED_NAMES = {"kept graph": "carried graph"}  # names of patterns if backward passes run through the retained graphs
_MAX_AGE = 2  # steps after which a loss should have been freed

_MAX_EVAL = 50


class AutogradPatterns:
    """Finds patterns in the graphs of the observed steps.

    Args:
        fail: called with an internal error during the script's evaluation, instead of raising it.
        parameters: returns the parameters of all optimizers that have stepped.
        mine: returns whether this thread is profiled.

    Attributes:
        trained_on: inputs of the forward passes through which the backward passes of a step ran.
        evaluated_at: lines that called a network in evaluation mode, with counts.
        cleared: the gradients of backward passes until they are cleared or read.
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
        self.cleared = ClearedGradients(parameters)
        self._trained_s: dict[int, float] = {}
        self._traceback_lines = 0
        self._profiled: list[tuple[int, float]] = []
        self._found: defaultdict[tuple[Any, str], Counter[int]] = defaultdict(Counter)
        self._seconds: defaultdict[tuple[Any, str], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._validations = ValidationTimer(
            sites, mine, lambda where, seconds: self._count(ARGUMENT_VALIDATION, [Mark(where, self._step, seconds)])
        )
        self._retained_graphs, self._retaining_lines = RetainedGraphs(sites, fail), Counter[str]()
        self._evaluating, self._headroom = Patches(), RecursionHeadroom()
        self._graded: list[Mark] = []
        self._evaluated = self._depth = 0
        self.trained_on: list[CallInputs] = []
        self.evaluated_at = Counter[str]()

    @property
    def on(self) -> bool:
        """Whether the current step is observed."""
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
        self, args: tuple, kwargs: dict, result: Any, seconds: float, lines: tuple[str, ...], given: CallInputs
    ) -> None:
        """Records an outermost forward pass; `args[0]` is the module. See `Forward` for the others."""
        mark = Mark(lines[0], self._step, seconds)
        nodes: list[Any] = [value.grad_fn for value in tensors_in(result) if value.grad_fn is not None]
        inputs = tensor_fingerprints(args[1:], kwargs)
        forward = Forward(id(args[0]), mark, lines, inputs, bool(nodes), args[0].training, given)
        if nodes and next(args[0].parameters(), None) is not None:
            forward.outputs = any(value.requires_grad for value in tensors_in(args[1:])), tensor_fingerprints(result)
        for node in nodes:
            node.metadata[_FORWARD] = mark
        if nodes:
            self._forwards.append(forward)
        elif not torch.is_grad_enabled():
            self._ungraded.append(forward)

    def backward(self, args: tuple, where: str, updates: int = 0) -> None:
        """Records the start of a backward pass. `args` are those of `torch.autograd._engine_run_backward`."""
        creates_graph, has_inputs = (len(args) > at and bool(args[at]) for at in (3, 4))  # create_graph; inputs
        retained = len(args) > 3 and bool(args[2]) and not creates_graph
        mark, loss = Mark(where, self._step, updates=updates), Mark(where, self._step)
        roots: list[Any] = [
            value.grad_fn for value in args[0] if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        nodes, again = list(walk(roots)), []
        self._traceback_lines = sum(map(traceback_lines, nodes))
        for node in nodes:
            metadata = node.metadata
            for kind in (_FORWARD, _RETAINED):
                if kind in metadata:
                    metadata[kind].is_walked = True
            before = metadata.get(_RETAINED)
            if before is not None and (before.step, before.updates) == (self._step, updates):
                again.append(node)
            if retained and node.next_functions:
                metadata[_RETAINED] = mark
            if self._is_new(node):  # lives as long as any part of the graph: a term of the loss, an output
                metadata[_LOSS] = loss
        self._find_needless_work(nodes, again, where, returns_gradients=has_inputs or creates_graph)
        # No later pass runs through a graph that the step's last backward pass creates.
        self._created = (where, self._walks.latest_nodes) if creates_graph else None
        if retained:
            self._retained.append(mark)
        self._losses.append((self._step, where, weakref.ref(loss)))

    def optimizer_stepped(self, optimizer: Any) -> None:
        if self._on:
            self.cleared.optimizer_stepped(value for group in optimizer.param_groups for value in group["params"])

    def _find_needless_work(self, nodes: list[Any], again: list[Any], where: str, *, returns_gradients: bool) -> None:
        """Counts needless work. A pass with `returns_gradients` doesn't add to the gradients of tensors."""
        older = sum(bool(node.next_functions) and not self._is_new(node) for node in nodes)
        self._walks.record(nodes, where, self._step, older)
        if returns_gradients:
            self._asked = self._step
            self.cleared.asked()
            return
        needless = [
            *self._walks.find_shared_graph(again, where, self._step),
            *self._walks.find_unused_gradients(nodes, _forward_of, where, self._step),
            *self.cleared.record(nodes, where, self._step, _forward_of),
        ]
        for work in needless:
            if work.what != "input gradients" or self._asked != self._step:
                self._found[work.what, work.where][self._step] += work.amount

    def _is_new(self, node: Any) -> bool:
        """Returns whether this step created a node. Older nodes, as those of parameters, may be shared."""
        return bool(node.next_functions) and node._sequence_nr() >= self._first_node

    def step_done(self, *, usual: bool = True) -> None:
        """Ends a step; patterns of an unusual step aren't counted."""
        self.on = self.on and usual
        self.cleared.step_done(self._step)
        if self.on or self._losses or self._retained or self._before is not None:
            self._review_step()
        self._step += 1
        self._first_node = next_sequence_number()

    def _review_step(self) -> None:
        """Counts the patterns in the graphs of this step and of those before it."""
        if self.on:
            self._observed.append(self._step)
            trained = [forward for forward in self._forwards if forward.mark.is_walked]
            needed = [*trained, *(self._before or ())]
            if self._before is not None:
                self._followed.append(self._step)
                inputs = inputs_of(trained)
                self._same += bool(inputs) and inputs == inputs_of(self._before)
            for forward in self._forwards + self._ungraded:
                if not forward.mark.is_walked and (what := self._name_unused_forward(forward, trained)):
                    forward.mark.where = own_line(forward, needed)
                    self._count(what, [forward.mark])
            for forward, first in repeats(trained):
                forward.mark.where = own_line(forward, [first])
                self._count("repeated forward", [forward.mark])
            if self._created is not None:
                where, nodes = self._created
                self._count("created graph", [Mark(where, self._step, nodes * create_graph_us() / 1e6)])
            self.trained_on = [forward.given for forward in trained if forward.given is not None] or self.trained_on
            self._trained_s[self._step] = sum([forward.mark.seconds for forward in trained])
            self._before = trained
        else:
            self._before = None
        self._forwards, self._ungraded, self._created = [], [], None
        old = [mark for mark in self._retained if mark.step < self._step]
        self._count("retained graph", (mark for mark in old if not mark.is_walked))
        self._retained = [mark for mark in self._retained if mark.step >= self._step]
        for step, where, _ in (
            forward for forward in self._losses if forward[0] == self._step - _MAX_AGE and forward[2]() is not None
        ):
            self._found["kept graph", where][step] += 1
        self._retaining_lines.update(self._retained_graphs.live_lines(self._step - _MAX_AGE))
        self._losses = [loss for loss in self._losses if loss[0] > self._step - _MAX_AGE]

    def _name_unused_forward(self, forward: Forward, trained: Sequence[Forward]) -> str:
        """Returns the pattern of a forward pass without backward pass; after the update, the next step decides."""
        if not forward.has_graph:
            if is_eval(forward, trained):
                return "evaluation"
            return _LATE_PREFIX + "evaluation" if is_repeat(forward, self._before or ()) else ""
        if not forward.training and is_eval(forward, trained):
            return "evaluation"
        if is_repeat(forward, trained):
            return "wasted forward"
        if not any(forward.module == other.module for other in trained):
            return "unused graph"
        if self._before is None:
            return ""
        return _LATE_PREFIX + ("wasted forward" if is_repeat(forward, self._before) else "unused graph")

    def _count(self, what: str, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._found[what, mark.where][mark.step] += 1
            self._seconds[what, mark.where][mark.step] += mark.seconds

    def note_modes(self, where: str) -> None:
        """Records debugging modes that slow down every operation, when a backward pass begins."""
        self._backwards += 1
        if torch.is_anomaly_enabled():
            self._found["hook", where][self._backwards] += 1
            self._seconds["hook", where][self._backwards] += self._traceback_lines * anomaly_mode_us() / 1e6
        if torch.autograd.profiler._is_profiler_enabled:
            self._found["profiler", where][self._backwards] += 1
            operators = 2 * self._walks.latest_nodes  # one operator creates each node, and the node runs one
            self._profiled.append((operators, _measure_us(torch.zeros(1))))

    def note_recomputation(self, seconds: float, where: str) -> None:
        """Counts a forward pass that a backward pass has repeated."""
        if self.on:
            self._found["recomputed forward", where][self._step] += 1
            self._seconds["recomputed forward", where][self._step] += seconds

    def begin_evaluation(self) -> None:
        """Starts to check whether graphs are built while the network is in evaluation mode."""
        self._headroom.make()
        self._evaluating.patch(
            nn.Module, "__call__", with_callbacks(lambda: self._evaluated < _MAX_EVAL, self._enter, self._leave)
        )

    def end_evaluation(self) -> None:
        self._evaluating.undo()
        self._headroom.give_back()
        self._depth = 0

    def remove(self) -> None:
        """Removes all patches."""
        self.end_evaluation()
        self.on = False

    @stop_on_error
    def _enter(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.perf_counter()

    @stop_on_error
    def _leave(self, began: float, args: tuple, kwargs: dict, result: Any, is_done: bool) -> None:
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
        for node in nodes:  # detects a later backward pass, as for the gradient of an input
            node.register_prehook(partial(_mark_walked, mark))

    @property
    def has_one_batch(self) -> bool:
        """Whether each step trained the network on the inputs of the step before."""
        return bool(self._followed) and self._same == len(self._followed)

    def records(self) -> list[dict[str, Any]]:
        """Returns records as `profiles.Habit`: patterns in more than half of the observed steps.

        A validation of many batches inside of one step isn't in every step; evaluation with graphs is returned anyway.
        Needless parts of backward passes and repeated forward passes have their share of the time as `part`.
        """
        steps: dict[str, Sequence[int]] = {
            "hook": range(1, self._backwards + 1),
            "profiler": range(1, self._backwards + 1),
            "kept graph": [step for step in self._observed if step < self._step - _MAX_AGE],
            "unused gradients": self._observed[1:],  # the first step gives the values to compare with
            CLEARED: self._followed or self._observed,  # gradients of a step are cleared in the next step
            UNREAD: self._followed or self._observed,
        }
        records, retaining_lines = (
            [],
            match_lines([where for what, where in self._found if what == "kept graph"], self._retaining_lines),
        )
        for (what, where), counts in self._found.items():
            counted_steps = steps.get(what, self._followed if what.startswith(_LATE_PREFIX) else self._observed)
            seconds = self._seconds[what, where]
            records.append(
                _pattern(what, where, _median_amount(counts, counted_steps), _median_amount(seconds, counted_steps))
            )
            if what == "profiler":
                records[-1] |= {"calls": _median_at(self._profiled, 0), "call_us": _median_at(self._profiled, 1)}
            if part := self._part(what, where, seconds):
                records[-1] |= {"what": _CARRIED_NAMES.get(what, what), "part": part}
            elif what == "kept graph":
                records[-1]["where"] = retaining_lines.get(where, where)
        return [record for record in records if record["per_step"]] + self._evaluations_with_graphs()

    def _part(self, what: str, where: str, seconds: Mapping[int, float]) -> float:
        """Returns a pattern's share of the backward time, which is taken as proportional to the forward time."""
        if what in (CLEARED, UNREAD):
            return self.cleared.dropped_share(what, where)
        if what != "repeated forward":
            return self._walks.needless_share(what, where)
        trained_s = sum(self._trained_s[step] for step in seconds)
        return sum(seconds.values()) / trained_s if trained_s else 0.0

    def _evaluations_with_graphs(self) -> list[dict[str, Any]]:
        """Returns records of evaluations whose graphs no backward pass ran through, over all steps."""
        unused = [mark for mark in self._graded if not mark.is_walked]
        steps = max(1, self._step)
        return [
            _pattern("autograd in evaluation", where, len(marks) / steps, sum(mark.seconds for mark in marks) / steps)
            for where in dict.fromkeys(mark.where for mark in unused)
            for marks in [[mark for mark in unused if mark.where == where]]
        ]


def _pattern(what: str, where: str, per_step: float, seconds: float) -> dict[str, Any]:
    ms = seconds * 1e3 if seconds else None
    return {"what": what.removeprefix(_LATE_PREFIX), "where": where, "per_step": per_step, "ms": ms}


def _median_at(pairs: Sequence[tuple[float, float]], at: int) -> float:
    return median(pair[at] for pair in pairs)


def _median_amount(amounts: Mapping[int, float], steps: Sequence[int]) -> float:
    """Returns the median over the given steps, the lower of two."""
    return float(median_low([amounts.get(step, 0) for step in steps])) if steps else 0.0


def _mark_walked(mark: Mark, gradients: Any) -> None:
    mark.is_walked = True


def _forward_of(node: Any) -> str:
    """Returns the line of the forward pass that ended at a node; empty if none did."""
    mark = node.metadata.get(_FORWARD)
    return mark.where if mark is not None else ""


@dataclass
class Mark:
    """A record of a forward or backward pass, stored in the metadata of graph nodes.

    Attributes:
        is_walked: whether a further backward pass has run through the node.
        updates: number of optimizer updates before the pass.
    """

    where: str
    step: int
    seconds: float = 0.0
    is_walked: bool = False
    updates: int = 0


@dataclass
class Forward:
    """An outermost forward pass.

    Attributes:
        lines: the user's lines that called the module, innermost first.
        inputs: fingerprints of the inputs, see `tensor_fingerprints`.
        training: whether the module was in training mode.
        given: the tensors among the inputs, and whether a loader gave a batch since the forward pass before.
        outputs: whether inputs need gradients, and fingerprints of the outputs; None if a repetition costs little.
    """

    module: int
    mark: Mark
    lines: tuple[str, ...]
    inputs: frozenset[tuple]
    has_graph: bool
    training: bool
    given: CallInputs
    outputs: tuple[bool, frozenset[tuple]] | None = None


def is_eval(forward: Forward, trained: Sequence[Forward]) -> bool:
    """Returns whether a forward pass without backward pass only evaluates the network that is trained here.

    A pass in training mode on other samples may belong to training: it may compute targets, actions or labels. So may a
    pass in evaluation mode on fewer samples than the network is trained on, if no loader gave them.
    """
    if not forward.training:
        others = [other for other in trained if other.module == forward.module and other.training]
        return any(
            forward.given.is_after_batch or (forward.given.rows or 1) >= (other.given.rows or 1) for other in others
        )
    return is_repeat(forward, trained)


def is_repeat(forward: Forward, trained: Sequence[Forward]) -> bool:
    """Returns whether the same network was trained on the same inputs."""
    return bool(forward.inputs) and any(
        other.module == forward.module and other.inputs == forward.inputs for other in trained
    )


def repeats(trained: Sequence[Forward]) -> Iterator[tuple[Forward, Forward]]:
    """Yields passes of a network with the inputs and outputs of an earlier pass, each with that pass."""
    firsts: dict[tuple, Forward] = {}
    for forward in trained:
        first = firsts.setdefault((forward.module, forward.inputs, forward.outputs), forward)
        if first is not forward and forward.inputs and forward.outputs is not None:
            yield forward, first


def inputs_of(trained: Sequence[Forward]) -> set[tuple]:
    return {(forward.module, forward.inputs) for forward in trained if forward.inputs}


def own_line(forward: Forward, known: Sequence[Forward]) -> str:
    """Returns the line that distinguishes a pass from those that training needs; several may share a function."""
    others = [other.lines for other in known if other.module == forward.module and other.lines[0] == forward.lines[0]]
    pairs = zip(forward.lines, others[0], strict=False) if others else ()
    return next((line for line, other in pairs if line != other), forward.lines[0])


_MIN_SHARE = 0.4
"""Least share of steps with, and without, an evaluation for the evaluation to count as one of every second step."""


class EvaluationPauses:
    """Adds evaluations and checkpoints to the facts of the step in which they happen.

    Args:
        step: returns the current step.
    """

    def __init__(self, graphs: AutogradPatterns, step: Callable[[], StepFact | None]) -> None:
        self._graphs, self._step = graphs, step
        self._modes = 0
        self._returns = 0
        self._evaluated_before: dict[int, tuple[StepFact, float]] = {}
        self._evaluating_since: float | None = None
        self._saved: Counter[str] = Counter()

    @property
    def is_evaluating(self) -> bool:
        return self._evaluating_since is not None

    def mode_began(self) -> None:
        """Counts nested calls of `Module.train`, which calls itself for submodules."""
        self._modes += 1

    def mode_ended(self, *, training: bool) -> None:
        self._modes = max(0, self._modes - 1)
        if self._modes:
            return
        if training:
            self._note_evaluation()
            self.end_evaluation()
        elif not self.is_evaluating:
            self._evaluating_since = time.perf_counter()
            self._graphs.begin_evaluation()

    def _note_evaluation(self) -> None:
        """Adds the time since evaluation mode began, when the network returns to training mode."""
        step = self._step()
        if self._evaluating_since is not None and step is not None:
            self._returns += 1
            known_s = self._evaluated_before.get(id(step), (step, 0.0))[1]
            self._evaluated_before[id(step)] = step, known_s + time.perf_counter() - self._evaluating_since

    def end_evaluation(self) -> None:
        if self._evaluating_since is not None:
            self.note("evaluation", time.perf_counter() - self._evaluating_since)
            self._evaluating_since = None
            self._graphs.end_evaluation()

    def note(self, what: str, seconds: float) -> None:
        step = self._step()
        if step is not None:
            step.flags += [what] if what not in step.flags else []
            step.apart_ms[what] = step.apart_ms.get(what, 0.0) + seconds * 1e3

    def checkpoint_saved(self, where: str, began: float | None) -> None:
        """Records a checkpoint if its start, in `time.perf_counter` seconds, is known."""
        if began is not None:
            self.note("checkpoint", time.perf_counter() - began)
            self._saved[where] += 1

    def records(self, steps: Sequence[StepFact], steps_done: int) -> list[dict[str, Any]]:
        """Returns records as `profiles.Habit`.

        They are checkpoints that more than half of the measured steps write, and evaluations of every second step,
        which the observed steps may miss.

        Args:
            steps_done: number of steps that have ended, measured or not.
        """
        measured = [step for step in steps if step.kind in ("clean", "instrumented")]
        return [*self._checkpoints(measured), *self._evaluations(steps_done, measured)]

    def _evaluations(self, steps_done: int, measured: Sequence[StepFact]) -> list[dict[str, Any]]:
        """Counts evaluations over all steps: the measured steps may be every second one."""
        evaluated_ms = {id(step): 1e3 * seconds for step, seconds in self._evaluated_before.values()}
        per_step = self._returns / max(1, steps_done)
        pauses_ms = [evaluated_ms[id(step)] for step in measured if id(step) in evaluated_ms] or list(
            evaluated_ms.values()
        )
        if not self._graphs.evaluated_at or not _MIN_SHARE <= per_step < 1 - _MIN_SHARE or not measured:
            return []
        ((where, _),) = self._graphs.evaluated_at.most_common(1)
        ms = per_step * sum(pauses_ms) / len(pauses_ms)
        rest_ms = sum(max(0.0, step.ms - evaluated_ms.get(id(step), 0.0)) for step in measured) / len(measured)
        return [{"what": "evaluation", "where": where, "per_step": per_step, "share": ms / (ms + rest_ms), "ms": None}]

    def _checkpoints(self, measured: Sequence[StepFact]) -> list[dict[str, Any]]:
        spent = [step.apart_ms["checkpoint"] for step in measured if "checkpoint" in step.apart_ms]
        if 2 * len(spent) <= len(measured) or not self._saved:
            return []
        ((where, _),) = self._saved.most_common(1)
        return [{"what": "checkpoint", "where": where, "per_step": len(spent) / len(measured), "ms": median(spent)}]


_TINY_NUMBERS = 20


_TRACEBACK_PREFIX = "traceback_"
"""Key of a node's metadata under which torch's anomaly detection stores the lines of the stack."""


def traceback_lines(node: Any) -> int:
    """Returns the number of stack lines that anomaly detection stored for a node; 0 without it."""
    return len(node.metadata.get(_TRACEBACK_PREFIX, ()))


def anomaly_mode_us() -> float:
    """Returns how much longer an operator takes under anomaly detection, in microseconds per line of the stack.

    The measurement runs in a new thread, without the profiler's frames on the stack, which may take longer than the
    script's.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure_anomaly_mode_us).result()


def _measure_anomaly_mode_us() -> float:
    tiny = torch.zeros(1, requires_grad=True).neg()  # not a leaf: an operator on a leaf creates a further node
    _measure_us(tiny)  # warm-up: anomaly detection reads the source files once
    anomaly_us, node = _measure_us(tiny), tiny.neg().grad_fn
    with torch.autograd.set_detect_anomaly(False):
        return max(0.0, anomaly_us - _measure_us(tiny)) / max(1, traceback_lines(node))


@cache
def create_graph_us() -> float:
    """Returns how many microseconds longer a backward node takes if it also creates a graph."""
    _backward_node_us(True)
    return max(0.0, min(_backward_node_us(True) for _ in range(3)) - min(_backward_node_us(False) for _ in range(3)))


def _backward_node_us(creating: bool) -> float:
    """Calls the engine directly, without the hooks around `torch.autograd.grad`."""
    out = leaf = torch.ones(1, requires_grad=True)
    for _ in range(_TINY_NUMBERS):
        out = out * leaf
    run = torch.autograd.Variable._execution_engine.run_backward
    began = time.perf_counter()
    run((out,), (torch.ones(1),), True, creating, (leaf,), allow_unreachable=True, accumulate_grad=False)
    return (time.perf_counter() - began) / _TINY_NUMBERS * 1e6


def _measure_us(tiny: Tensor) -> float:
    began = time.perf_counter()
    for _ in range(_TINY_NUMBERS):
        tiny.neg()
    return (time.perf_counter() - began) / _TINY_NUMBERS * 1e6


@hide_from_compiler
def find_identities(operators: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the shapes, such as `3000x3000`, of identity matrices from which operators take rows.

    A shape is returned if all plain tensors (no parameters) of that shape are identities.
    """
    shapes = {operator["shapes"][0] for operator in operators if operator["name"] in TAKE_ROWS and operator["shapes"]}
    square_shapes = {shape for shape in shapes if _is_square(shape)}
    if not square_shapes:
        return []
    identities: dict[str, bool] = {}
    with DisableTorchDispatch():  # hidden from the script's dispatch modes
        for value in gc.get_objects():
            # Subclasses, such as parameters, may store their data elsewhere.
            shape = "x".join(map(str, value.shape)) if type(value) is Tensor else ""
            if shape in square_shapes:
                identities[shape] = identities.get(shape, True) and _is_identity(value)
    return sorted(shape for shape, all_are in identities.items() if all_are)


def _is_square(shape: str) -> bool:
    sides = shape.split("x")
    return len(sides) == 2 and sides[0] == sides[1] and int(sides[0]) > 1


def _is_identity(value: Tensor) -> bool:
    matrix = value.detach()
    if matrix.layout != torch.strided or matrix.is_meta:
        return False
    return bool((matrix.diagonal() == 1).all()) and int(matrix.count_nonzero()) == len(matrix)


ARGUMENT_VALIDATION = "argument validation"

_VALIDATING_METHODS = ("__init__", "_validate_sample")
"""Methods of the base class: `__init__` mainly validates, torch calls `_validate_sample` only to validate."""


class ValidationTimer:
    """Times argument validation between `listen` and `stop`; `note` receives the line and CPU seconds of each."""

    def __init__(self, sites: CallSites, mine: Callable[[], bool], note: Callable[[str, float], None]) -> None:
        self._sites, self._mine, self._note = sites, mine, note
        self._patches, self._depth = Patches(), 0

    def listen(self) -> None:
        self._depth = 0
        for name in _VALIDATING_METHODS:
            self._patches.patch(Distribution, name, with_callbacks(self._mine, self._began, self._ended))

    def stop(self) -> None:
        self._patches.undo()

    def _began(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.thread_time()

    def _ended(self, began: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and args[0]._validate_args:
            self._note(self._sites.caller_line(3), time.thread_time() - began)
