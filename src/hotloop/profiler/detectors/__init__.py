"""What bounds a step, how far it is from the machine's limit, and what would help; without torch.

Each file is one family of causes: functions that look at what was measured, and never at a script's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hotloop.core.records.profile import COUNTS, Profile, Remedy
from hotloop.profiler.detectors import (
    compilation,
    concatenation,
    data_loading,
    device_sync,
    distributed_training,
    machine_use,
    operators,
    optimizer_updates,
    parameter_loops,
    python_lines,
    small_ops,
    wasted_work,
    work_between_steps,
)
from hotloop.profiler.detectors.bottleneck import bound_of, limit_ms
from hotloop.profiler.detectors.step import Detector, Step

__all__ = ["diagnose"]

SPECIFIC: tuple[Detector, ...] = (
    wasted_work.habitual,
    wasted_work.in_vain,
    data_loading.opened,
    data_loading.waiting,
    data_loading.unpinned,
    device_sync.reading,
    device_sync.copying,
    device_sync.pointless,
    operators.by_index,
    operators.double_precision,
    operators.unsupported,
    operators.looked_up,
    operators.multiplied_out,
    optimizer_updates.one_by_one,
    optimizer_updates.remade,
    optimizer_updates.beside,
    optimizer_updates.zeroing,
    optimizer_updates.dense_tables,
    python_lines.measuring,
    concatenation.joined,
    parameter_loops.read_one_by_one,
    parameter_loops.in_hooks,
    small_ops.loops,
    machine_use.crowded,
)
GENERAL: tuple[Detector, ...] = (
    python_lines.aside,
    python_lines.inside,
    wasted_work.without_gradient,
    small_ops.written_out,
    operators.unusual,
    operators.layouts,
    machine_use.idle,
)
"""They only say where the time goes: what is no more than another says of the place is left out."""

ABSOLUTE: tuple[Detector, ...] = (operators.unusual, operators.layouts)
"""They compare operators' times with what the machine reaches, which tells nothing where other programs use the machine."""

_NEARLY = 0.3
"""Of what memory that is given back takes, something else must win as much to come before it."""

_SAME = 0.2
"""Part by which the gains of two remedies may differ that are of the same cost."""

OF_ARRAYS: tuple[Detector, ...] = (data_loading.waiting,)
"""For a step written out in array operations, before the size of the batch: the others look at what torch's operations do, or advise its own ways."""


def diagnose(profile: Profile) -> Profile:
    """The profile with its bound, its limit and its remedies; as it is where steps couldn't be told apart.

    Remedies are ordered by what they can win; those that count too little to win anything are notes, and come last.
    """
    if not profile.step_ms or not profile.steps:
        return profile
    step = Step(profile, profile.step_ms)
    bound, evidence = bound_of(step)
    return profile.model_copy(
        update={
            "bound": bound,
            "bound_evidence": evidence,
            "limit_ms": limit_ms(step),
            **_with_compiling(step),
        }
    )


def _with_compiling(step: Step) -> dict[str, list[Any]]:
    """The remedies, with compiling among them only where a measurement found that compiling wins."""
    found = remedies(step)
    won, advice = compilation.measured(step)
    known = step.profile.compiled is not None or step.profile.engine == "arrays" or bool(step.profile.busy)
    candidates = [] if known else _worth(compilation.candidates(step))
    return {
        "remedies": sorted([*found, *won], key=lambda remedy: (remedy.note, -remedy.gain)),
        "candidates": candidates,
        "advice": [*work_between_steps.share_of_run(step), *advice, *compilation.unmeasured(step, candidates)],
    }


def remedies(step: Step) -> list[Remedy]:
    """What would help, most winning first; without a plan, as scripts are, none has axes of it."""
    arrays = step.profile.engine == "arrays"
    specific = _worth(chain.from_iterable(detect(step) for detect in (OF_ARRAYS if arrays else SPECIFIC)))
    named = small_ops.in_loops(step).union(one.where for one in specific if not one.note)
    told = replace(step, named=named)
    busy = bool(step.profile.busy or step.profile.limits.busy)
    detectors = [] if arrays else [one for one in GENERAL if not (busy and one in ABSOLUTE)]
    general = _worth(chain.from_iterable(detect(told) for detect in detectors))
    found = _together(step, specific, general)
    paged = [_after(one, specific, found) for one in _worth(machine_use.given_back(step))]
    small, others = _worth(machine_use.too_small(told)), [one for one in found if not one.note]
    if small and not (machine_use.may_stay(step) and others):
        found = _together(step, [*specific, *(machine_use.after(step, one, others) for one in small)], general)
    if not step.profile.plan:
        found = [one.model_copy(update={"axes": {}}) for one in found]
        paged = [one.model_copy(update={"axes": {}}) for one in paged]
    return sorted([*_once(step, found), *paged], key=lambda remedy: (remedy.note, -remedy.gain))


def _together(step: Step, specific: Sequence[Remedy], general: Sequence[Remedy]) -> list[Remedy]:
    beside = _beside(step, general, specific)
    again = {_told(one) for one in beside}  # of the same cause there, and wins more
    return [*(one for one in specific if _told(one) not in again), *beside, *_worth(distributed_training.shared(step))]


def _told(one: Remedy) -> tuple[str, str]:
    """The place, and the cause without its figures."""
    return one.where, one.cause.partition(":")[0]


def _after(paged: Remedy, specific: Sequence[Remedy], found: Sequence[Remedy]) -> Remedy:
    """Memory given back is a note beside a remedy that may change the allocations.

    An operator that takes long is no such remedy, and neither is a copy that takes less time than the memory: both may take
    long because the system gives the memory anew.
    """
    others = [one for one in found if not (one.note or operators.MUCH in one.cause)]
    others = [one for one in others if concatenation.COPIED not in one.cause or one.gain >= paged.gain]
    beside = any(one in specific or one.gain >= _NEARLY * paged.gain for one in others)
    return paged.model_copy(update={"note": beside})


def _once(step: Step, found: Sequence[Remedy]) -> list[Remedy]:
    """Without remedies of a line that only calls the line of another remedy, which wins nearly as much: the same cost."""
    outer = {line.where: line.within for line in step.profile.lines if line.within}
    counted = [one for one in found if not one.note]
    again = {
        id(one) for one in counted for other in counted if _calls(one.where, other.where, outer) and _alike(one, other)
    }
    return [one for one in found if id(one) not in again]


def _calls(where: str, inner: str, outer: Mapping[str, str]) -> bool:
    """Whether a line calls another one, through any number of functions."""
    seen = {inner}
    while (inner := outer.get(inner, "")) and inner not in seen:
        if inner == where:
            return True
        seen.add(inner)
    return False


def _alike(one: Remedy, other: Remedy) -> bool:
    return abs(one.gain - other.gain) < max(COUNTS, _SAME * max(one.gain, other.gain))


def _beside(step: Step, general: Sequence[Remedy], specific: Sequence[Remedy]) -> list[Remedy]:
    """General remedies of places where nothing is named, or that win so much more that something else takes the rest.

    What a loop's line does, the loop does, unless that is plain Python first of all; and what lies behind a line that hands the training over is many things.
    """
    updates = (one.where for one in optimizer_updates.one_by_one(step))
    loops = small_ops.in_loops(step, plain=False).union(updates) - step.handed
    named = [one for one in specific if not one.note and one.where not in step.handed]
    won = {one.where: one.gain for one in sorted(named, key=lambda one: one.gain)}
    return [one for one in general if one.where not in loops and one.gain >= COUNTS + won.get(one.where, -COUNTS)]


def _worth(found: Iterable[Remedy]) -> list[Remedy]:
    return [remedy for remedy in found if remedy.note or remedy.gain >= COUNTS]
