"""Puts what a profiler saw beside what clocks measured, since under a profiler all takes longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hotloop.core.records.profile import LineTime, ModuleTime, OperatorTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.timers.module_names import ModuleName, OwnTime, enclosing_names, format_name

_MIN_COUNTED_SHARE = 0.8
"""FLOPs of a module are given if operators that take so much of its time are counted."""


def remove_profiler_overhead(
    operators: Sequence[OperatorTime],
    walls: Mapping[tuple[str, Phase], float],
    modules: Iterable[ModuleTime],
    phases: Mapping[Phase, float],
    traced: Mapping[Phase, float] | None = None,
) -> list[OperatorTime]:
    """Operators with the times that they would have without the profiler, the longest first.

    Those of a module shrink by what it takes by the clock over what it took while traced, others so far that they fit into
    their phase. A phase that took less time while traced, though a profiler only adds to it, was held up by other programs
    in the steps that the clocks measured, and so were its operators: they grow as it did. Times of a device's kernels stay
    as they are.

    Args:
        walls: own ms of each module and phase while traced, by name and phase; `""` outside of modules.
        modules, phases: as the clocks measured them.
        traced: ms of each phase while traced, with all that lies between its operators.
    """
    clocked = {(one.name, phase): own for one in modules for phase, own in _own_times(one)}
    factors = {key: _overhead_ratio(clocked[key], wall) for key, wall in walls.items() if clocked.get(key)}
    total: dict[Phase, float] = defaultdict(float)
    for one in operators:
        total[one.phase] += one.ms if one.device == "cpu" else 0.0
    outside = _overhead_ratio(phases.get("unattributed", 0.0), walls.get(("", "unattributed"), 0.0))

    def factor(one: OperatorTime) -> float:
        around = [factors[name, one.phase] for name in _enclosing_names(one.module) if (name, one.phase) in factors]
        if around:
            return around[0]
        return _overhead_ratio(phases[one.phase], total[one.phase]) if phases.get(one.phase) else outside

    found = [one if one.device != "cpu" else one.model_copy(update={"ms": one.ms * factor(one)}) for one in operators]
    shrunk: dict[Phase, float] = defaultdict(float)
    for one in found:
        shrunk[one.phase] += one.ms if one.device == "cpu" else 0.0
    grown = {
        phase: max(1.0, phases.get(phase, 0.0) / (ms * shrunk[phase] / total[phase]))
        for phase, ms in (traced or {}).items()
        if ms and shrunk[phase]
    }
    found = [
        one if one.device != "cpu" else one.model_copy(update={"ms": one.ms * grown.get(one.phase, 1.0)})
        for one in found
    ]
    return sorted(found, key=lambda one: -one.ms)


def clamp_lines_to_phases(lines: Sequence[LineTime], phases: Mapping[Phase, float]) -> list[LineTime]:
    """Lines with times that fit into their phases: looking at the stack holds a step up. Nothing grows."""
    total: dict[Phase, float] = defaultdict(float)
    for line in lines:
        total[line.phase] += line.own_ms
    factors = {phase: _overhead_ratio(phases.get(phase, 0.0), ms) for phase, ms in total.items()}
    return [
        line.model_copy(update={"ms": line.ms * factors[line.phase], "own_ms": line.own_ms * factors[line.phase]})
        for line in lines
    ]


def clamp_ops_to_phases(operators: Sequence[OperatorTime], phases: Mapping[Phase, float]) -> list[OperatorTime]:
    """Operators of the process with times that fit into their phases. Nothing grows."""
    total: dict[Phase, float] = defaultdict(float)
    for one in operators:
        total[one.phase] += one.ms if one.device == "cpu" else 0.0
    factors = {phase: _overhead_ratio(phases.get(phase, 0.0), ms) for phase, ms in total.items()}
    return [
        one if one.device != "cpu" else one.model_copy(update={"ms": one.ms * factors[one.phase]}) for one in operators
    ]


def _overhead_ratio(clocked: float, traced: float) -> float:
    return min(1.0, clocked / traced) if clocked and traced else 1.0


def _enclosing_names(name: str) -> Iterator[str]:
    """A module's name, and those of the modules around it; the model itself, where it has no name, comes last."""
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def with_device_times(
    own: Mapping[ModuleName, OwnTime], operators: Sequence[OperatorTime], *, alone: bool
) -> dict[ModuleName, OwnTime]:
    """Modules with the times of their kernels: the clock of the process sees when these were launched.

    Args:
        own: times of the process's clock.
        alone: whether there is but one model, so that operators give its modules without its name.
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
    """Adds the modules inside of compiled ones, which no clock sees: they take what their kernels take.

    Args:
        own: times of those that the clock saw; what is inside of one of them is taken from its own time.
        inside: modules that compiled kernels compute for, by the name that operators give.
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
    """Phases of a step with what was `unattributed` given to the phases that have shares in it; they add up as before."""
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
    """Modules with the FLOPs and bytes of their operators, forward and backward and with all inside."""
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
    for field in ("flops", "bytes"):
        known = [one for one in operators if getattr(one, field) is not None]
        if operators and sum(one.ms for one in known) >= _MIN_COUNTED_SHARE * total:
            update[field] = sum(getattr(one, field) for one in known)
    return module.model_copy(update=update)
