"""Reads a profiler's record of a step: operators with their modules, lines and own times, corrected by clock times.

Events on a thread are nested by their times. Operators inside of an operator with known counts belong to the outer
operator, so `aten::linear` includes the time of its `aten::addmm`. Backward events have the number of their node, which
gives the module and line of the forward. Device kernels have the number of the operator that launched them. A profiler
lengthens all operations, so modules' clocks and phases set the scale.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any, Literal, NamedTuple

from hotloop.core.records.profile import LineTime, ModuleTime, OperatorTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.steps import DELAYED
from hotloop.profiler.operator_cost import OpCost
from hotloop.profiler.timers.line_tracer import MARK, Line, TraceMark
from hotloop.profiler.timers.module_names import ModuleName, OwnTime, enclosing_names, format_name
from hotloop.profiler.trace.inductor_kernels import GRAPH_PREFIX, KernelLaunch

OptimizerPart = Literal["", "step", "zero_grad"]
"""Part of an optimizer that contains an operator."""

_MIN_STEPS = 3  # least number of steps for a typical time


class OperatorKey(NamedTuple):
    """Key under which calls of operators are summed."""

    name: str
    phase: Phase
    module: ModuleName | None
    line: Line | None
    shapes: tuple[str, ...]
    dtype: str
    device: str
    copies: str
    used: bool | None
    within: OptimizerPart = ""
    outer: str = ""
    is_in_hook: bool = False


class OperatorTotal:
    def __init__(self) -> None:
        self.calls, self.ns = 0, 0.0
        self.flops: float | None = 0.0
        self.bytes: float | None = 0.0

    def add(self, ns: float, flops: float | None, bytes_: float | None, calls: int = 1) -> None:
        self.calls += calls
        self.ns += ns
        self.flops = None if flops is None or self.flops is None else self.flops + flops
        self.bytes = None if bytes_ is None or self.bytes is None else self.bytes + bytes_


@dataclass
class TracedSteps:
    """Totals of one step, or several.

    Attributes:
        ms: time of the steps.
        sums: totals of operators.
        walls: own ns of each module, forward and backward, and of each phase outside of modules.
        phases: ns of each phase, with the time between operators.
        grounds: per step, ns of each pair of timeline phase and phase by lines.
        line_runs: runs of each line by Python.
        alike: number of equal modules with the same input as each.
        fused, around: modules of compiled kernels: those that share a kernel, and the compiled module.
        compiled_ns: ns of compiled kernels, by phase.
    """

    ms: float = 0.0
    sums: dict[OperatorKey, OperatorTotal] = field(default_factory=lambda: defaultdict(OperatorTotal))
    walls: Counter[tuple[ModuleName | None, Phase]] = field(default_factory=Counter)
    phases: Counter[Phase] = field(default_factory=Counter)
    grounds: list[Counter[tuple[Phase, Phase]]] = field(default_factory=list)
    line_runs: Counter[Line] = field(default_factory=Counter)
    alike: dict[ModuleName, int] = field(default_factory=dict)
    fused: dict[ModuleName, set[ModuleName | None]] = field(default_factory=lambda: defaultdict(set))
    around: dict[ModuleName, ModuleName | None] = field(default_factory=dict)
    compiled_ns: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0

    def add(self, other: TracedSteps) -> None:
        for key, total in other.sums.items():
            self.sums[key].add(total.ns, total.flops, total.bytes, total.calls)
        self.walls.update(other.walls)
        self.phases.update(other.phases)
        self.line_runs.update(other.line_runs)
        for name, many in other.alike.items():
            self.alike[name] = max(many, self.alike.get(name, 0))
        for name, others in other.fused.items():
            self.fused[name] |= others
        for phase, ns in other.compiled_ns.items():
            self.compiled_ns[phase] += ns
        self.grounds += other.grounds
        self.around |= other.around
        self.ms += other.ms
        self.steps += other.steps


def merge_typical_steps(steps: Sequence[TracedSteps]) -> TracedSteps:
    """Merges the typical steps. Occasional work, such as sampling or a plot, makes a step longer.

    Delays of an operator in a single step, when another program has the core, are subtracted.
    """
    found = TracedSteps()
    limit = DELAYED * median_low(step.ms for step in steps) if steps else 0.0
    alike = [step for step in steps if step.ms <= limit]
    for step in alike:
        found.add(step)
    for key, total in found.sums.items():
        if key.device == "cpu" and (held_up := _delay_ns([step.sums[key] for step in alike if key in step.sums])):
            total.ns -= held_up
            found.ms -= held_up / 1e6
            _subtract_time(found.walls, (key.module, key.phase), held_up)
            _subtract_time(found.phases, key.phase, held_up)
    return found


def _subtract_time(times: Counter[Any], of: Any, ns: float) -> None:
    if of in times:
        times[of] = max(0, times[of] - round(ns))


def _delay_ns(sums: Sequence[OperatorTotal]) -> float:
    """Returns the ns beyond the median in steps in which calls took several times as long; 0 for few steps."""
    if len(sums) < _MIN_STEPS:
        return 0.0
    usual = median_low(one.ns / one.calls for one in sums)
    return sum(one.ns - usual * one.calls for one in sums if one.ns > DELAYED * usual * one.calls)


ENGINE_PREFIX = "autograd::engine::evaluate_function: "
_OPTIMIZER_RANGES: dict[str, OptimizerPart] = {"Optimizer.step#": "step", "Optimizer.zero_grad#": "zero_grad"}
_OPTIMIZER_NAMES = tuple(_OPTIMIZER_RANGES)
_ACCUMULATE_NODE = "AccumulateGrad"
"""The node that runs hooks on its finished gradient; other hooks run before or after their node."""
_LOADING_PREFIX = "enumerate(DataLoader)#"
_WAITING_OPS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
_HIDDEN_NAMES = (
    MARK,
    GRAPH_PREFIX,
    ENGINE_PREFIX,
    _LOADING_PREFIX,
    "ProfilerStep#",
    "## Call CompiledFxGraph",
    "Pregraph",
    "AOTDispatcher",
)


@dataclass
class TraceEvent:
    """An event of the profiler; times in ns.

    Attributes:
        number: number of the next node that the operator makes, or that the backward runs; -1 for none.
        maker: for backward, the thread that made the node; else 0.
        id: number to which `launched_by` of kernels refers.
        device: `cpu`, or that of a kernel, such as `cuda:0`.
    """

    name: str
    thread: int
    start: int
    end: int
    number: int = -1
    maker: int = 0
    id: int = 0
    launched_by: int = 0
    device: str = "cpu"
    shapes: Sequence[Any] = ()
    dtypes: Sequence[str] = ()
    arguments: Sequence[Any] = ()


@dataclass
class OperatorCall:
    """One call of an operator.

    Attributes:
        ns: own time, with operators that belong to the call.
        mark: the mark of its module and phase; None if unknown.
        line: the user's line.
        counts: cost with all operators inside; None if unknown.
        launch: the kernel of a compiled graph; None outside of such graphs.
        kernels: device kernels.
        created_nodes: numbers of the nodes that it made: first, and last + 1.
        outer: the enclosing operator.
        within: the part of an optimizer that contains the call.
        is_in_hook: whether `line` called it during a backward, outside of a node's own computation.
    """

    event: TraceEvent
    phase: Phase
    mark: TraceMark | None
    line: Line | None
    counts: OpCost | None = None
    launch: KernelLaunch | None = None
    ns: int = 0
    kernels: list[TraceEvent] = field(default_factory=list)
    created_nodes: tuple[int, int] = (0, 0)
    outer: OperatorCall | None = None
    within: OptimizerPart = ""
    is_in_hook: bool = False

    @property
    def outermost(self) -> str:
        """The name of the outermost enclosing `aten` operator; empty for none."""
        around = self.outer
        if around is None:
            return ""
        return around.outermost or (around.event.name if around.event.name.startswith("aten::") else "")


class TraceReader:
    """Reads the events of one step.

    Args:
        marks: marks of the step.
        counts: returns an operator's cost, None if unknown; an operator with a cost includes all operators inside.
        graphs: kernels of compiled graphs, by number.

    Attributes:
        thread: the marked thread.
    """

    def __init__(
        self,
        marks: Sequence[TraceMark],
        counts: Callable[[TraceEvent], OpCost | None],
        graphs: Sequence[Sequence[KernelLaunch]] = (),
    ) -> None:
        self._marks, self._counts, self._graphs = marks, counts, graphs
        self._numbers = [mark.number for mark in marks]
        self._starts: list[int] = []
        self.thread = -1
        self._node: TraceEvent | None = None

    def operators(self, events: Iterable[TraceEvent]) -> list[OperatorCall]:
        """Returns operators of the marked thread, and of the backward on any thread, with their kernels."""
        ordered = sorted(events, key=lambda event: (event.start, -event.end))
        found_marks = [event for event in ordered if event.name.startswith(MARK)]
        self._starts = [event.start for event in found_marks]
        self.thread = found_marks[0].thread if found_marks else -1
        found: list[OperatorCall] = []
        by_id: dict[int, OperatorCall] = {}
        for thread in {event.thread for event in ordered if event.device == "cpu"}:
            found += self._of_thread([e for e in ordered if e.thread == thread and e.device == "cpu"], by_id)
        self._exclude_closures(found)
        for event in ordered:
            if event.device != "cpu" and event.launched_by in by_id:
                by_id[event.launched_by].kernels.append(event)
        self._note_created_nodes(found)
        return found

    def segments(self) -> Iterator[tuple[TraceMark, int, int]]:
        """Yields each mark with its start and end, in ns."""
        for number, (start, end) in enumerate(pairwise(self._starts)):
            if number < len(self._marks):
                yield self._marks[number], start, end

    def nodes(self, events: Iterable[TraceEvent]) -> Iterator[tuple[TraceMark | None, TraceEvent]]:
        """Yields the backward nodes, each with the mark under which it was made."""
        last: TraceMark | None = None
        for event in sorted(events, key=lambda event: event.start):
            if event.name.startswith(ENGINE_PREFIX):
                last = self._maker_of(event) if event.number >= 0 else last
                yield last, event

    def _of_thread(self, events: list[TraceEvent], by_id: dict[int, OperatorCall]) -> list[OperatorCall]:
        found: list[OperatorCall] = []
        around: list[tuple[TraceEvent, OperatorCall | None, _Context]] = []
        for event in events:
            while around and around[-1][0].end <= event.start:
                around.pop()
            if event.name.startswith(MARK) or event.launched_by:
                continue
            outer = around[-1] if around else (None, None, _Context())
            context = self._context(event, outer[2])
            operator = self._operator(event, outer[1], context)
            if operator is not None:
                by_id[event.id] = operator
                if operator.event is event:
                    found.append(operator)
                    operator.outer = outer[1]
                    operator.ns += event.end - event.start
                    if outer[1] is not None and (operator.phase == "update" or not _is_update(outer[1].event)):
                        outer[1].ns -= event.end - event.start
            around.append((event, operator if operator is not None else outer[1], context))
        return found

    def _operator(self, event: TraceEvent, outer: OperatorCall | None, context: _Context) -> OperatorCall | None:
        """Returns the operator of an event, or to which the event belongs; None for other events."""
        if outer is not None and outer.counts is not None:
            return outer
        if event.name.startswith(_HIDDEN_NAMES):
            return None
        mark, line, hooked = self._owner_of(event, context)
        if mark is None and context.node is None:
            return None
        hooked = hooked and (outer is None or outer.is_in_hook or outer.event.name.endswith(_ACCUMULATE_NODE))
        phase, counts, launch = self._phase(event, mark, context), self._counts(event), context.launch(event.name)
        return OperatorCall(event, phase, mark, line, counts, launch, within=context.within, is_in_hook=hooked)

    def _context(self, event: TraceEvent, outer: _Context) -> _Context:
        if event.name.startswith(ENGINE_PREFIX):
            # A parameter's gradient is accumulated right after the node that made it.
            self._node = event if event.number >= 0 or self._node is None else self._node
            return _Context(self._node, outer.update, within=outer.within)
        if event.name.startswith(GRAPH_PREFIX):
            number = int(event.name.removeprefix(GRAPH_PREFIX))
            launches = list(self._graphs[number]) if number < len(self._graphs) else []
            return _Context(outer.node, outer.update, launches, outer.within)
        if _is_update(event):
            within = next(within for name, within in _OPTIMIZER_RANGES.items() if event.name.startswith(name))
            return _Context(outer.node, event.start, outer.launches, within)
        return outer

    def _owner_of(self, event: TraceEvent, context: _Context) -> tuple[TraceMark | None, Line | None, bool]:
        """Returns the mark and line of an event, and whether the line ran during a backward."""
        now = self._mark_at(event.start) if event.thread == self.thread else None
        if context.node is None:
            return now, now.line if now is not None else None, False
        made = self._maker_of(context.node)
        if now is None or not now.is_in_backward or now is not self._mark_after(context.node, event):
            return made, made.line if made is not None else None, False
        line = now.line or (made.line if made is not None else None)
        return (now if now.place is not None else made), line, now.line is not None

    def _mark_at(self, start: int) -> TraceMark | None:
        at = bisect_right(self._starts, start) - 1
        return self._marks[at] if 0 <= at < len(self._marks) else None

    def _mark_after(self, node: TraceEvent, event: TraceEvent) -> TraceMark | None:
        """Returns the last mark before an event, if it is later than the node's start."""
        at = bisect_right(self._starts, event.start) - 1
        return self._marks[at] if 0 <= at < len(self._marks) and self._starts[at] >= node.start else None

    def _maker_of(self, node: TraceEvent) -> TraceMark | None:
        """Returns the mark under which a node was made; None if before the step or on another thread."""
        if node.number < 0 or (node.maker and self.thread >= 0 and node.maker != self.thread):
            return None
        at = bisect_right(self._numbers, node.number) - 1
        return self._marks[at] if at >= 0 else None

    def _phase(self, event: TraceEvent, mark: TraceMark | None, context: _Context) -> Phase:
        if context.node is not None:
            return "backward"
        if context.update is not None and self._updates(mark, context.update):
            return "update"
        if mark is None:
            return "unattributed"
        if mark.executed_phase in ("python", "unattributed", "loss") and event.name.startswith(_WAITING_OPS):
            return "synchronisation"
        return mark.executed_phase

    def _updates(self, mark: TraceMark | None, began: int) -> bool:
        """Returns whether a mark belongs to the optimizer's own work; its closure has other marks.

        After the closure, the line is that of the optimizer's caller, and the phase may still be the closure's.
        """
        before = self._mark_at(began)
        if mark is None or mark.executed_phase == "update" or mark is before:
            return True
        returned = before is not None and mark.line is not None and mark.line == before.line
        return returned and mark.place is None and not mark.is_in_backward

    def _exclude_closures(self, found: Iterable[OperatorCall]) -> None:
        """Subtracts an optimizer's closure, with the time between its operators, from the optimizer's time."""
        for one in found:
            if one.event.thread == self.thread and _is_update(one.event):
                inside = (s for s in self.segments() if s[1] >= one.event.start and s[2] <= one.event.end)
                others = (end - start for mark, start, end in inside if not self._updates(mark, one.event.start))
                one.ns = max(0, one.ns - sum(others))

    def _note_created_nodes(self, found: list[OperatorCall]) -> None:
        """Sets the nodes of each operator: from its number up to that of the next operator."""
        forward = [o for o in found if o.event.number >= 0 and o.event.thread == self.thread and o.phase != "backward"]
        forward.sort(key=lambda operator: operator.event.start)
        last = self._numbers[-1] if self._numbers else 0
        after = [operator.event.number for operator in forward[1:]] + [last]
        for operator, following in zip(forward, after, strict=True):
            operator.created_nodes = (operator.event.number, max(following, operator.event.number))
        for operator in found:  # outer operators first: autograd records a custom function, not its operators
            if (
                operator.outer is not None
                and operator.event.number < 0
                and operator.phase not in ("backward", "update")
            ):
                operator.created_nodes = operator.outer.created_nodes


@dataclass(frozen=True)
class _Context:
    """What contains an event: backward node, an optimizer's update by its start, a compiled graph's pending kernels."""

    node: TraceEvent | None = None
    update: int | None = None
    launches: list[KernelLaunch] = field(default_factory=list)
    within: OptimizerPart = ""

    def launch(self, name: str) -> KernelLaunch | None:
        """Removes and returns the graph's next kernel of that name."""
        for at, launch in enumerate(self.launches):
            if launch.name == name:
                return self.launches.pop(at)
        return None


def _is_update(event: TraceEvent) -> bool:
    return event.name.startswith(_OPTIMIZER_NAMES)


def backward_nodes(events: Iterable[TraceEvent]) -> set[int]:
    return {event.number for event in events if event.name.startswith(ENGINE_PREFIX)}


_COPY_NAME = re.compile(r"Memcpy (\w)to(\w)")


def copy_direction(kernel: TraceEvent) -> str:
    """Returns the devices of a copy, such as `cpu>cuda:0`; empty if the kernel copies within a device."""
    found = _COPY_NAME.match(kernel.name)
    if found is None or found[1] == found[2]:
        return ""
    sides = {"H": "cpu", "D": kernel.device}
    return f"{sides.get(found[1], kernel.device)}>{sides.get(found[2], kernel.device)}"


_MIN_COUNTED_SHARE = 0.8  # least share of a module's operator time with known counts, for the module's FLOPs and bytes


def remove_profiler_overhead(
    operators: Sequence[OperatorTime],
    walls: Mapping[tuple[str, Phase], float],
    modules: Iterable[ModuleTime],
    phases: Mapping[Phase, float],
    traced: Mapping[Phase, float] | None = None,
) -> list[OperatorTime]:
    """Returns operators with times corrected for the profiler's overhead, the longest first.

    An operator shrinks by the ratio of its module's clock time to its traced time; without a module, until the
    operators fit into their phase. A phase with a smaller traced time than clock time was delayed by other programs
    while the clock ran, so its operators grow in proportion. Times of device kernels stay.

    Args:
        walls: traced own ms of each module and phase; the name is `""` outside of modules.
        modules, phases: clock times.
        traced: traced ms of each phase, with the time between operators.
    """
    clocked = {(one.name, phase): own for one in modules for phase, own in _own_times(one)}
    factors = {key: _overhead_ratio(clocked[key], wall) for key, wall in walls.items() if clocked.get(key)}
    total = _host_ms(operators)
    outside = _overhead_ratio(phases.get("unattributed", 0.0), walls.get(("", "unattributed"), 0.0))

    def factor(one: OperatorTime) -> float:
        around = [factors[name, one.phase] for name in _enclosing_names(one.module) if (name, one.phase) in factors]
        if around:
            return around[0]
        return _overhead_ratio(phases[one.phase], total[one.phase]) if phases.get(one.phase) else outside

    found = _scale_host_times(operators, factor)
    shrunk = _host_ms(found)
    grown = {
        phase: max(1.0, phases.get(phase, 0.0) / (ms * shrunk[phase] / total[phase]))
        for phase, ms in (traced or {}).items()
        if ms and shrunk[phase]
    }
    found = _scale_host_times(found, lambda one: grown.get(one.phase, 1.0))
    return sorted(found, key=lambda one: -one.ms)


def clamp_lines_to_phases(lines: Sequence[LineTime], phases: Mapping[Phase, float]) -> list[LineTime]:
    """Returns lines shrunk to fit into their phases: stack sampling delays a step."""
    total: dict[Phase, float] = defaultdict(float)
    for line in lines:
        total[line.phase] += line.own_ms
    factors = {phase: _overhead_ratio(phases.get(phase, 0.0), ms) for phase, ms in total.items()}
    return [
        line.model_copy(update={"ms": line.ms * factors[line.phase], "own_ms": line.own_ms * factors[line.phase]})
        for line in lines
    ]


def clamp_ops_to_phases(operators: Sequence[OperatorTime], phases: Mapping[Phase, float]) -> list[OperatorTime]:
    """Returns the host's operators shrunk to fit into their phases."""
    total = _host_ms(operators)
    factors = {phase: _overhead_ratio(phases.get(phase, 0.0), ms) for phase, ms in total.items()}
    return _scale_host_times(operators, lambda one: factors[one.phase])


def _host_ms(operators: Iterable[OperatorTime]) -> dict[Phase, float]:
    total: dict[Phase, float] = defaultdict(float)
    for one in operators:
        total[one.phase] += one.ms if one.device == "cpu" else 0.0
    return total


def _scale_host_times(operators: Sequence[OperatorTime], factor: Callable[[OperatorTime], float]) -> list[OperatorTime]:
    """Returns operators with the host's times multiplied; those of device kernels stay."""
    return [one if one.device != "cpu" else one.model_copy(update={"ms": one.ms * factor(one)}) for one in operators]


def _overhead_ratio(clocked: float, traced: float) -> float:
    return min(1.0, clocked / traced) if clocked and traced else 1.0


def _enclosing_names(name: str) -> Iterator[str]:
    """Yields a module's name and those of its parents, the unnamed model last."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def with_device_times(
    own: Mapping[ModuleName, OwnTime], operators: Sequence[OperatorTime], *, alone: bool
) -> dict[ModuleName, OwnTime]:
    """Returns modules with the times of their kernels; host clocks only see the launches.

    Args:
        own: host clock times.
        alone: whether there is one model, whose name operators leave out.
    """
    taken: dict[tuple[str, bool], float] = defaultdict(float)
    for one in operators:
        if one.device != "cpu":
            taken[one.module, one.phase == "backward"] += one.ms
    names = {name: format_name(name, alone=alone) for name in own}
    return {name: OwnTime(taken[names[name], False], taken[names[name], True], own[name].calls) for name in own}


def with_compiled(
    own: Mapping[ModuleName, OwnTime], operators: Sequence[OperatorTime], inside: Mapping[str, ModuleName]
) -> dict[ModuleName, OwnTime]:
    """Adds modules inside of compiled modules, with the times of their kernels; hooks can't time them.

    Args:
        own: clock times; the time of an added module is subtracted from that of the module around it.
        inside: modules of compiled kernels, by the name that operators use.
    """
    found = dict(own)
    for told, name in inside.items():
        if name.is_part:
            continue
        forward, backward = (
            sum(one.ms for one in operators if one.module == told and one.phase in phases)
            for phases in (("forward", "loss"), ("backward",))
        )
        seen = own.get(name, OwnTime(0.0, 0.0, 0.0))
        around = next((above for above in enclosing_names(name) if above in own and name not in own), None)
        calls = own[around].calls if around is not None else 1.0
        found[name] = OwnTime(max(forward, seen.forward_ms), max(backward, seen.backward_ms), max(calls, seen.calls))
        if around is not None:
            left = found[around]
            less = max(0.0, left.forward_ms - forward), max(0.0, left.backward_ms - backward)
            found[around] = OwnTime(*less, left.calls)
    return found


def with_shares(phases: Mapping[Phase, float], shares: Mapping[Phase, float]) -> dict[Phase, float]:
    """Returns phases with `unattributed` time moved to the phases that have shares of it."""
    found = dict(phases)
    unknown = found.get("unattributed", 0.0)
    for phase, share in shares.items():
        found[phase] = found.get(phase, 0.0) + unknown * share
        found["unattributed"] -= unknown * share
    return found


def with_fused(modules: Sequence[ModuleTime], fused: Mapping[str, list[str]]) -> list[ModuleTime]:
    """Marks modules that share kernels with others."""
    return [one.model_copy(update={"fused_with": fused[one.name]}) if fused.get(one.name) else one for one in modules]


def _own_times(module: ModuleTime) -> Iterable[tuple[Phase, float]]:
    if module.own_forward_ms is not None:
        yield ("loss" if module.name == "(loss)" else "forward"), module.own_forward_ms
    if module.own_backward_ms is not None:
        yield "backward", module.own_backward_ms


def with_counts(modules: Sequence[ModuleTime], operators: Sequence[OperatorTime]) -> list[ModuleTime]:
    """Returns modules with the FLOPs and bytes of their operators, forward and backward, with submodules."""
    return [_count_module(module, [one for one in operators if _is_inside(one, module.name)]) for module in modules]


def _is_inside(operator: OperatorTime, module: str) -> bool:
    if operator.phase not in ("forward", "loss", "backward"):
        return False
    if operator.module == module:
        return True
    return not operator.module.startswith("(") and (not module or operator.module.startswith(f"{module}."))


def _count_module(module: ModuleTime, operators: Sequence[OperatorTime]) -> ModuleTime:
    total = sum(one.ms for one in operators)
    update: dict[str, float | None] = {}
    for name in ("flops", "bytes"):
        known = [one for one in operators if getattr(one, name) is not None]
        if operators and sum(one.ms for one in known) >= _MIN_COUNTED_SHARE * total:
            update[name] = sum(getattr(one, name) for one in known)
    return module.model_copy(update=update)
