"""What traced steps came to, each by itself and several together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal, NamedTuple

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.schedule import DELAYED
from hotloop.profiler.timers.line_tracer import Line
from hotloop.profiler.timers.module_names import ModuleName

OptimizerPart = Literal["", "step", "zero_grad"]
"""What of an optimizer's an operator lies in."""

_MIN_STEPS = 3
"""Steps from which on it can be told what is usual."""


class OperatorKey(NamedTuple):
    """What makes calls of operators one record."""

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
    """What the calls of one record come to."""

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
    """One step, or several.

    Attributes:
        ms: that it took.
        sums: of its operators.
        walls: nanoseconds of each module forward and backward, and of each phase without.
        phases: nanoseconds of each, with all that lies between operators.
        grounds: of each step, nanoseconds of each phase of the timeline in each that the lines say.
        line_runs: how often Python ran each line.
        alike: of how many modules that got the same input each was one.
        fused, around: modules that kernels were compiled for: those that share one with them, and what was compiled.
        compiled_ns: of compiled kernels, by phase.
        steps: how many.
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
    """All that were like the others: what a loop does now and then, such as sampling or a plot, makes a step longer.

    What an operator took longer in one of them because another program had its core is none of its time.
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
    """Nanoseconds that calls took beyond the usual in steps in which they took several times as long; of two, nobody knows."""
    if len(sums) < _MIN_STEPS:
        return 0.0
    usual = median_low(one.ns / one.calls for one in sums)
    return sum(one.ns - usual * one.calls for one in sums if one.ns > DELAYED * usual * one.calls)
