"""Observers that record steps in more detail than phases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.schedule import Kind, Observer, middle_mean
from hotloop.profiler.hooks.resources import GarbageCollections
from hotloop.profiler.session.session import ProfilerSession
from hotloop.profiler.timers.line_sampler import LinePhases, StackSampler, phase_shares, shift_phases
from hotloop.profiler.timers.module_names import ModuleNames, module_times
from hotloop.profiler.timers.modules import ModuleClock
from hotloop.profiler.trace.calibration import (
    clamp_lines_to_phases,
    remove_profiler_overhead,
    with_compiled,
    with_counts,
    with_device_times,
    with_fused,
    with_shares,
)
from hotloop.profiler.trace.tracer import Tracer


def make_observers(
    session: ProfilerSession, trace: str | Path | None, model: nn.Module | None = None
) -> list[Observer]:
    """Returns the observers of garbage collections, lines, modules and operators.

    Args:
        trace: file for the Chrome trace of the traced steps.
        model: the model that names its modules, inside any wrappers; None to find the model.
    """
    lines = LineObserver(session)
    inside = _OperatorObserver(session, None if trace is None else Path(trace), model, lines.sampler)
    return [GarbageCollections(session.sites), lines, inside.modules, inside]


class LineObserver:
    kinds: Sequence[Kind] = ("sampled",)

    def __init__(self, session: ProfilerSession) -> None:
        sites, self._session = session.sites, session
        turn = LinePhases(sites, session.facts).phase
        timeline = session.timeline
        self.sampler = StackSampler(
            sites.is_own, sites.place, lambda: timeline.current, turn=turn, last_mark=lambda: timeline.last_mark
        )
        timeline.amended = self.sampler.amend
        self.begin, self.end, self.close = self.sampler.begin, self.sampler.end, self.sampler.close
        self.drop = self.sampler.drop

    def records(self) -> dict[str, list[dict[str, Any]]]:
        lines = clamp_lines_to_phases(self.sampler.lines(), _instrumented_phases(self._session))
        return {"lines": [line.model_dump() for line in lines]}


class ModuleObserver:
    kinds: Sequence[Kind] = ("clocked", "whole")

    def __init__(self, namer: ModuleNames) -> None:
        self.clock = ModuleClock(namer=namer)
        self.begin, self.end, self.close = self.clock.begin, self.clock.end, self.clock.close
        self.drop = self.clock.drop

    def records(self) -> dict[str, list[dict[str, Any]]]:
        return {}


class _OperatorObserver:
    kinds: Sequence[Kind] = ("traced", "whole")

    def __init__(
        self, session: ProfilerSession, trace: Path | None, model: nn.Module | None, sampler: StackSampler
    ) -> None:
        self._session, self._trace, self._sampler = session, trace, sampler
        self._namer = ModuleNames()
        known = model if session.compilations.model is None else session.compilations.model
        if known is not None:
            self._namer.add_model(known)
        self.modules = ModuleObserver(self._namer)
        sites = session.sites
        self._tracer = Tracer(
            sites.is_own,
            sites.place,
            lambda: session.timeline.current,
            self._namer,
            session.compilations,
            LinePhases(sites, session.facts).phase,
        )
        self.begin, self.end, self.drop = self._tracer.begin, self._tracer.end, self._tracer.drop

    def close(self) -> None:
        self._tracer.close()
        if self._session.compilations.model is not None:
            shares = self._tracer.compiled_shares()
            for step in self._session.facts.steps:
                if step.phases:
                    step.phases = with_shares(step.phases, shares)
        if self._trace is not None and (written := self._tracer.write(self._trace)) is not None:
            self._session.facts.trace = str(written)

    def records(self) -> dict[str, list[Any]]:
        self._session.facts.turned = phase_shares(self._tracer.grounds, self._sampler.shifted_s, self._sampler.samples)
        clock, tracer, step_ms = self.modules.clock, self._tracer, self._step_ms()
        walls, phases = tracer.walls(), _instrumented_phases(self._session)
        operators = remove_profiler_overhead(tracer.operators(), walls, clock.times(step_ms), phases, tracer.phases())
        own = clock.own()
        if self._session.facts.device != "cpu" and operators:
            own = with_device_times(own, operators, alone=tracer.alone)
        own = with_compiled(own, operators, tracer.compiled_modules())
        modules = with_fused(module_times(own, self._namer.kinds, step_ms), tracer.fused())
        self._note(clock.notes + tracer.notes)
        return {
            "modules": [module.model_dump() for module in with_counts(modules, operators)],
            "operators": [operator.model_dump() for operator in operators],
        }

    def _step_ms(self) -> float | None:
        steps = [step.ms for step in self._session.facts.steps if step.kind == "instrumented" and step.ms]
        return middle_mean(steps) if steps else None

    def _note(self, notes: Sequence[str]) -> None:
        self._session.facts.notes += [note for note in notes if note not in self._session.facts.notes]


def _instrumented_phases(session: ProfilerSession) -> dict[Phase, float]:
    steps = [step.phases for step in session.facts.steps if step.phases]
    names = {name for phases in steps for name in phases}
    means = {name: middle_mean([phases.get(name, 0.0) for phases in steps]) for name in names}
    return shift_phases(means, session.facts.turned)
