"""Finds what bounds a step, its distance from the machine's limit, and remedies; without torch.

Each file has the detectors of one family of causes. Detectors read measurements, never the text of a script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from hotloop.core.records.profile import COUNTS, Profile, Remedy
from hotloop.profiler.detectors import (
    bottleneck,
    code_regions,
    data_loading,
    device_sync,
    operators,
    optimizer_updates,
    python_lines,
    small_ops,
    wasted_work,
)
from hotloop.profiler.detectors.step import Detector, ProfiledStep

__all__ = ["diagnose"]

SPECIFIC_DETECTORS: tuple[Detector, ...] = (
    wasted_work.slow_patterns,
    wasted_work.unused_functions,
    data_loading.reopened_loader,
    data_loading.slow_loading,
    data_loading.unpinned_memory,
    device_sync.host_sync,
    device_sync.device_copies,
    device_sync.no_op_copies,
    operators.index_scatter,
    operators.double_precision,
    operators.unsupported_precision,
    operators.one_hot_matmul,
    operators.expanded_low_rank,
    optimizer_updates.per_parameter_update,
    optimizer_updates.recreated_optimizer,
    optimizer_updates.manual_update,
    optimizer_updates.zero_fill_gradients,
    optimizer_updates.dense_embedding_update,
    python_lines.step_metrics,
    operators.concatenation_in_loop,
    code_regions.parameter_reads,
    code_regions.gradient_hooks,
    small_ops.python_loops,
    bottleneck.too_many_threads,
)
GENERAL_DETECTORS: tuple[Detector, ...] = (
    python_lines.python_in_loop,
    python_lines.python_in_forward,
    wasted_work.no_grad_work,
    small_ops.unfused_chain,
    operators.slow_operators,
    operators.slow_layouts,
    bottleneck.idle_cores,
)
"""They report where time goes. Their remedies are dropped at places that a specific detector explains."""

ABSOLUTE_DETECTORS: tuple[Detector, ...] = (operators.slow_operators, operators.slow_layouts)
"""They compare operator times with the machine's limits, so they are skipped if other programs use the machine."""

_CLOSE_GAIN = 0.3  # least ratio of another remedy's gain to that of memory returned to the OS to have priority over it
_SAME_COST = 0.2  # relative difference of gains up to which two remedies count as the same cost


def diagnose(profile: Profile) -> Profile:
    """Returns the profile with its bound, limit and remedies; unchanged if no steps were found.

    Remedies are sorted by gain. Those below the threshold are notes and come last.
    """
    if not profile.step_ms or not profile.steps:
        return profile
    step = ProfiledStep(profile, profile.step_ms)
    bound, evidence = bottleneck.find_bound(step)
    return profile.model_copy(
        update={
            "bound": bound,
            "bound_evidence": evidence,
            "limit_ms": bottleneck.limit_ms(step),
            **_with_compile_remedy(step),
        }
    )


def _with_compile_remedy(step: ProfiledStep) -> dict[str, list[Any]]:
    """Compiling is a remedy only if a measurement shows a gain."""
    found = find_remedies(step)
    won, advice = small_ops.compile_race_result(step)
    known = step.profile.compiled is not None or bool(step.profile.busy)
    candidates = [] if known else _worthwhile(small_ops.compile_candidates(step))
    return {
        "remedies": sorted([*found, *won], key=lambda remedy: (remedy.note, -remedy.gain)),
        "candidates": candidates,
        "advice": [
            *bottleneck.irregular_work_note(step),
            *advice,
            *small_ops.missing_measurements(step, candidates),
        ],
    }


def find_remedies(step: ProfiledStep) -> list[Remedy]:
    """Returns remedies by gain. Without a plan, as for scripts, they have no plan axes."""
    specific = _worthwhile(chain.from_iterable(detect(step) for detect in SPECIFIC_DETECTORS))
    named = small_ops.lines_in_loops(step).union(one.where for one in specific if not one.note)
    told = replace(step, named=named)
    busy = bool(step.profile.busy or step.profile.limits.busy)
    detectors = [one for one in GENERAL_DETECTORS if not (busy and one in ABSOLUTE_DETECTORS)]
    general = _worthwhile(chain.from_iterable(detect(told) for detect in detectors))
    found = _merge_remedies(step, specific, general)
    paged = [_after_paging(one, specific, found) for one in _worthwhile(bottleneck.memory_returned_to_os(step))]
    small, others = _worthwhile(bottleneck.small_batch(told)), [one for one in found if not one.note]
    if small and not (bottleneck.can_stay(step) and others):
        found = _merge_remedies(
            step, [*specific, *(bottleneck.as_note_beside(step, one, others) for one in small)], general
        )
    if not step.profile.plan:
        found = [one.model_copy(update={"axes": {}}) for one in found]
        paged = [one.model_copy(update={"axes": {}}) for one in paged]
    return sorted([*_without_callers(step, found), *paged], key=lambda remedy: (remedy.note, -remedy.gain))


def _merge_remedies(step: ProfiledStep, specific: Sequence[Remedy], general: Sequence[Remedy]) -> list[Remedy]:
    unexplained = _unexplained(step, general, specific)
    repeated = {_cause_key(one) for one in unexplained}  # general remedies of the same cause there gain more
    return [
        *(one for one in specific if _cause_key(one) not in repeated),
        *unexplained,
        *_worthwhile(bottleneck.rank_communication(step)),
    ]


def _cause_key(one: Remedy) -> tuple[str, str]:
    """Returns the place, and the cause without its figures."""
    return one.where, one.cause.partition(":")[0]


def _after_paging(paged: Remedy, specific: Sequence[Remedy], found: Sequence[Remedy]) -> Remedy:
    """Makes returned memory a note if another remedy may change the allocations.

    Slow operators, and copies with a smaller gain, aren't such remedies: page faults may be why they are slow.
    """
    others = [one for one in found if not (one.note or operators.TAKES_MUCH in one.cause)]
    others = [one for one in others if operators.CONCATENATION not in one.cause or one.gain >= paged.gain]
    beside = any(one in specific or one.gain >= _CLOSE_GAIN * paged.gain for one in others)
    return paged.model_copy(update={"note": beside})


def _without_callers(step: ProfiledStep, found: Sequence[Remedy]) -> list[Remedy]:
    """Drops remedies of lines that only call the line of another remedy with nearly the same gain."""
    callers = {line.where: line.within for line in step.profile.lines if line.within}
    counted = [one for one in found if not one.note]
    repeated = {
        id(one)
        for one in counted
        for other in counted
        if _calls(one.where, other.where, callers)
        and abs(one.gain - other.gain) < max(COUNTS, _SAME_COST * max(one.gain, other.gain))
    }
    return [one for one in found if id(one) not in repeated]


def _calls(where: str, inner: str, outer: Mapping[str, str]) -> bool:
    """Returns whether a line calls another line, directly or indirectly."""
    seen = {inner}
    while (inner := outer.get(inner, "")) and inner not in seen:
        if inner == where:
            return True
        seen.add(inner)
    return False


def _unexplained(step: ProfiledStep, general: Sequence[Remedy], specific: Sequence[Remedy]) -> list[Remedy]:
    """Returns general remedies at places without a specific remedy, or whose gain is larger by the threshold.

    Lines of loops are left out, except for loops of plain Python. Lines that start a trainer don't count as explained.
    """
    updates = (one.where for one in optimizer_updates.per_parameter_update(step))
    loops = small_ops.lines_in_loops(step, plain=False).union(updates) - step.trainer_lines
    named = [one for one in specific if not one.note and one.where not in step.trainer_lines]
    won = {one.where: one.gain for one in sorted(named, key=lambda one: one.gain)}
    return [one for one in general if one.where not in loops and one.gain >= COUNTS + won.get(one.where, -COUNTS)]


def _worthwhile(found: Iterable[Remedy]) -> list[Remedy]:
    return [remedy for remedy in found if remedy.note or remedy.gain >= COUNTS]
