"""Corrects traced times with clock times: a profiler lengthens all operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hotloop.core.records.profile import LineTime, ModuleTime, OperatorTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.timers.module_names import ModuleName, OwnTime, enclosing_names, format_name

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
    for field in ("flops", "bytes"):
        known = [one for one in operators if getattr(one, field) is not None]
        if operators and sum(one.ms for one in known) >= _MIN_COUNTED_SHARE * total:
            update[field] = sum(getattr(one, field) for one in known)
    return module.model_copy(update=update)
