"""Totals of traced steps, single and merged."""

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
