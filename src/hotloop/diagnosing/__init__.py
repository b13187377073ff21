"""Facts of a Profile -> what bounds the step, how far it is from the machine's limit, and what would help. No torch.

Each file is one family of causes: functions that look at what was measured, and never at a script's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hotloop.diagnosing import (
    batches,
    between_steps,
    chains,
    compilation,
    concatenation,
    cores,
    feeding,
    gradless,
    habits,
    lines,
    operators,
    paging,
    parameters,
    products,
    repeats,
    sharing,
    updating,
    waits,
)
from hotloop.diagnosing.bound import bound_of, limit_ms
from hotloop.diagnosing.step import COUNTS, Detector, Step
from hotloop.profiles import Profile, Remedy

__all__ = ["diagnose"]

SPECIFIC: tuple[Detector, ...] = (
    habits.habitual,
    habits.in_vain,
    feeding.opened,
    feeding.waiting,
    feeding.unpinned,
    waits.reading,
    waits.copying,
    waits.pointless,
    operators.by_index,
    operators.double_precision,
    operators.unsupported,
    products.looked_up,
    products.multiplied_out,
    updating.one_by_one,
    updating.remade,
    updating.beside,
    updating.zeroing,
    updating.dense_tables,
    lines.measuring,
    concatenation.joined,
    parameters.read_one_by_one,
    parameters.in_hooks,
    repeats.loops,
    cores.crowded,
)
GENERAL: tuple[Detector, ...] = (
    lines.aside,
    lines.inside,
    gradless.without_gradient,
    chains.written_out,
    operators.unusual,
    operators.layouts,
    cores.idle,
)
"""They only say where the time goes: what is no more than another says of the place is left out."""

ABSOLUTE: tuple[Detector, ...] = (operators.unusual, operators.layouts)
"""They compare operators' times with what the machine reaches, which tells nothing where other programs use the machine."""

_NEARLY = 0.3
"""Of what memory that is given back takes, something else must win as much to come before it."""

_SAME = 0.2
"""Part by which the gains of two remedies may differ that are of the same cost."""

OF_ARRAYS: tuple[Detector, ...] = (feeding.waiting,)
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
        "advice": [*between_steps.share_of_run(step), *advice, *compilation.unmeasured(step, candidates)],
    }


def remedies(step: Step) -> list[Remedy]:
    """What would help, most winning first; without a plan, as scripts are, none has axes of it."""
    arrays = step.profile.engine == "arrays"
    specific = _worth(chain.from_iterable(detect(step) for detect in (OF_ARRAYS if arrays else SPECIFIC)))
    named = repeats.in_loops(step).union(one.where for one in specific if not one.note)
    told = replace(step, named=named)
    busy = bool(step.profile.busy or step.profile.limits.busy)
    detectors = [] if arrays else [one for one in GENERAL if not (busy and one in ABSOLUTE)]
    general = _worth(chain.from_iterable(detect(told) for detect in detectors))
    found = _together(step, specific, general)
    paged = [_after(one, specific, found) for one in _worth(paging.given_back(step))]
    small, others = _worth(batches.too_small(told)), [one for one in found if not one.note]
    if small and not (batches.may_stay(step) and others):
        found = _together(step, [*specific, *(batches.after(step, one, others) for one in small)], general)
    if not step.profile.plan:
        found = [one.model_copy(update={"axes": {}}) for one in found]
        paged = [one.model_copy(update={"axes": {}}) for one in paged]
    return sorted([*_once(step, found), *paged], key=lambda remedy: (remedy.note, -remedy.gain))


def _together(step: Step, specific: Sequence[Remedy], general: Sequence[Remedy]) -> list[Remedy]:
    beside = _beside(step, general, specific)
    again = {_told(one) for one in beside}  # of the same cause there, and wins more
    return [*(one for one in specific if _told(one) not in again), *beside, *_worth(sharing.shared(step))]


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
    updates = (one.where for one in updating.one_by_one(step))
    loops = repeats.in_loops(step, plain=False).union(updates) - step.handed
    named = [one for one in specific if not one.note and one.where not in step.handed]
    won = {one.where: one.gain for one in sorted(named, key=lambda one: one.gain)}
    return [one for one in general if one.where not in loops and one.gain >= COUNTS + won.get(one.where, -COUNTS)]


def _worth(found: Iterable[Remedy]) -> list[Remedy]:
    return [remedy for remedy in found if remedy.note or remedy.gain >= COUNTS]
