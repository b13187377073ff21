"""From the evidence to one of the five classes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hotloop.core.records.race import STATES, TensorError
from hotloop.parity.comparison import FLOAT32_UNIT, KINDS, Key
from hotloop.parity.evidence import Evidence, StepErrors, TensorErrors
from hotloop.parity.free_run import FreeRunResult, KindDrift
from hotloop.parity.step_collector import errors_at_state, floor_ratio, largest_errors

# Fixed on five architectures and tried on five others: bench/parity_thresholds.py, docs/parity.md.
TYPICAL_LIMIT = 4.0
"""Times the floor that the median error of a tensor may be."""

WORST_LIMIT = 32.0
"""Times what rounding does at a state that the error there may be."""

_JUMP_RATIO = 8.0
"""Times the floor from which on the largest error of a harmless change is one of another kind."""

FREE_RUN_LIMIT = 8.0
"""Times the drift of the harmless baselines that a free run may end away from theirs."""

REDUCED_PRECISION_LIMIT = 8.0
"""In place of the last two in a reduced precision, where rounding itself is large."""

MAX_SHOWN_ERRORS = 50


def classify(account: StepErrors, evidence: Evidence, free: FreeRunResult | None) -> dict[str, Any]:
    """Class, reason and figures of one candidate."""
    if reason := evidence.unproven or account.unproven:
        return {"parity": "unproven", "reason": reason, "short_of_memory": account.short_of_memory}
    if account.failed:
        reason = f"its {account.failed}, which the baseline's doesn't"
        return {"parity": "broken", "reason": reason, "first": account.failed.partition(" raised ")[0]}
    if account.draws:
        return {"parity": "broken", "reason": f"its {account.draws}", "first": account.draws.partition(" (")[0]}
    of_fp32 = [] if evidence.peers else evidence.rounding
    reduced = evidence.reductions(account)
    known: dict[str, Any] = {
        "errors": typical_errors(account, evidence.baselines, of_fp32)[:MAX_SHOWN_ERRORS],
        "reductions": reduced,
    }
    if account.arithmetic is not None:
        known["arithmetic"] = account.arithmetic.lowest
    table = typical_errors(account, evidence.judges, evidence.rounding)
    if (wrong := _class_broken(account, evidence, table)) is not None:
        if reduced:
            wrong["reason"] += f"; {_describe_reduction(evidence, reduced)}"
        return known | wrong
    far = None if free is None else free.drifts_beyond(REDUCED_PRECISION_LIMIT if evidence.peers else FREE_RUN_LIMIT)
    if free is not None and (free.other or far):
        return known | {"parity": "broken", **_classify_drift(free, far)}
    if free is not None and free.count is not None:
        reason = f"{free.count.strip('/')} is another number than the baseline's after {free.steps} free steps"
        return known | {"parity": "unproven", "reason": reason}
    if (reason := _why_incomparable(account, evidence, table)) is not None:
        return known | {"parity": "unproven", "reason": reason}
    bitwise = (
        not reduced and not evidence.shared_draws and account.differs is None and (free is None or free.is_bitwise)
    )
    return known | _class_without_errors(account, table, bitwise, evidence, 0 if free is None else free.steps)


def _classify_drift(free: FreeRunResult, far: KindDrift | None) -> dict[str, str]:
    """Where a free run ended in another State."""
    if free.other or far is None:
        return {"reason": free.other or "", "first": f"the parameters, within {free.steps} steps"}
    reason = (
        f"after {free.steps} free steps {far.what} are {far.apart:.2g} of their way from the baseline's, where"
        f" rounding alone comes to {far.rounding:.2g}"
    )
    return {"reason": reason, "first": f"{far.what}, within {free.steps} steps"}


def _why_incomparable(account: StepErrors, evidence: Evidence, table: Sequence[TensorError]) -> str | None:
    """Why a tensor has no error that could be judged, though it isn't bitwise the eager step's, if there is one."""
    rows = [row for row in table if row.floor == math.inf and (row.what, row.name) in account.unequal]
    if not rows:
        return None
    row = min(rows, key=lambda row: KINDS.index(row.what))
    whose = (
        "the eager step's in that precision" if evidence.peers else "the baseline's or that of a harmless change of it"
    )
    return (
        f"the {row.what} {row.name!r} can't be compared: {whose} is altogether another than in float64, and the plan's"
        " isn't bitwise equal"
    )


def _class_without_errors(
    account: StepErrors, table: Sequence[TensorError], bitwise: bool, evidence: Evidence, free_steps: int
) -> dict[str, Any]:
    """The class of a candidate in which nothing is wrong."""
    reduced = evidence.reductions(account)
    largest, states = max((one.ratio for one in table), default=0.0), len(evidence.steps)
    compared = f"{states} single steps" if states >= STATES else f"all {states} single steps of the training"
    if bitwise:
        reason = f"in {compared} and a free run of {free_steps}, each bit is the baseline's"
        return {"parity": "bitwise", "reason": reason}
    if evidence.peers:
        of_fp32 = max((one.ratio for one in typical_errors(account, evidence.baselines, [])), default=0.0)
        beside = (
            "and larger than the baseline's"
            if of_fp32 > TYPICAL_LIMIT
            else "and no larger than the baseline's, as it happens"
        )
        reason = (
            f"{_describe_reduction(evidence, reduced)}: in {compared} its errors are at most {max(largest, 0.1):.1f} times those of"
            f" the eager step in that precision (allowed: {TYPICAL_LIMIT:g}), {beside}"
        )
        return {"parity": "reduced-precision", "reason": reason}
    if reduced:
        reason = (
            f"{_describe_reduction(evidence, reduced)}: in {compared} its errors are at most {max(largest, 0.1):.1f} times what"
            f" harmless changes of the baseline come to (allowed: {TYPICAL_LIMIT:g})"
        )
        return {"parity": "reduced-precision", "reason": reason}
    reason = (
        f"in {compared} no tensor is further from float64 than {max(largest, 0.1):.1f} times what harmless changes of"
        f" the baseline come to (allowed: {TYPICAL_LIMIT:g})"
    )
    if evidence.shared_draws:
        reason += f"; the baseline drew the plan's random numbers, {evidence.shared_draws}"
    if account.draw_notes:
        reason += "; what it draws has the baseline's rate and scale and is independent"
    return {"parity": "fp32-equivalent", "reason": reason}


def _describe_reduction(evidence: Evidence, reduced: Sequence[str]) -> str:
    """What a plan computes in fewer bits than the baseline, and whether it was asked to."""
    asked = "as it was asked to" if evidence.requested else "which its plan doesn't ask for"
    return f"{' and '.join(reduced) or 'it rounds to fewer bits'}, {asked}"


def _class_broken(account: StepErrors, evidence: Evidence, table: Sequence[TensorError]) -> dict[str, Any] | None:
    """The class `broken`, with the first tensor and step that went wrong."""
    off = {(one.what, one.name) for one in table if one.ratio > TYPICAL_LIMIT}
    limit = REDUCED_PRECISION_LIMIT if evidence.peers else WORST_LIMIT
    for step, errors, floor in zip(
        evidence.steps, account.errors, noise_floors(evidence.rounding, evidence.has_closer_look), strict=True
    ):
        far = {key for key, error in errors.items() if floor_ratio(error, floor.get(key)) > limit}
        wrong = far | {key for key in off if floor_ratio(errors.get(key, 0.0), floor.get(key)) > TYPICAL_LIMIT}
        if wrong:
            what, name = min(wrong, key=lambda key: (KINDS.index(key[0]), -errors[key]))
            times = floor_ratio(errors[what, name], floor.get((what, name)))
            size = "differs altogether" if times == float("inf") else f"is {times:.3g} times what rounding comes to"
            first = f"{what} {name!r} at step {step + 1}"
            return {"parity": "broken", "reason": f"the error of the {first} {size}", "first": first}
    if off:  # its median is, though at no state by itself
        what, name = min(off, key=lambda key: KINDS.index(key[0]))
        first = f"{what} {name!r} at step {evidence.steps[0] + 1}"
        return {"parity": "broken", "reason": f"the typical error of the {what} {name!r} is too large", "first": first}
    return None


def noise_floors(rounding: Sequence[TensorErrors], closer: Sequence[TensorErrors] = ()) -> list[TensorErrors]:
    """At each state what rounding does there, and no less than usual: of a single number, such as a loss, it may cancel.

    Args:
        closer: what it does where more nudges were tried, if they were.
    """
    usual = {key: error for key, error in _median_errors(rounding).items() if error != float("inf")}
    return [largest_errors([errors_at_state(here), usual]) for here in closer or rounding]


def typical_errors(
    account: StepErrors, judges: Sequence[StepErrors], rounding: Sequence[TensorErrors]
) -> list[TensorError]:
    """The median errors over the states against the floor that the judges make at the same ones, worst first.

    What a compiled step keeps to itself, such as gradients, is seen at those states alone where the step runs eagerly.
    """
    own = account.has_own_draws
    floor = _noise_floor([_comparable_errors(own, one.errors) for one in judges], _comparable_errors(own, rounding))
    found = _median_errors(own)
    rows = [
        TensorError(
            what=what,
            name=name,
            error=error,
            floor=floor.get((what, name), 0.0),
            ratio=floor_ratio(error, floor.get((what, name))),
        )
        for (what, name), error in found.items()
    ]
    return sorted(rows, key=lambda row: -row.ratio)


def _comparable_errors(own: Sequence[TensorErrors], errors: Sequence[TensorErrors]) -> list[TensorErrors]:
    """Errors at each state of what the plan's own errors have there, too."""
    return [{key: one[key] for key in one if key in seen} for one, seen in zip(errors, own, strict=False)]


def _noise_floor(judges: Sequence[Sequence[TensorErrors]], rounding: Sequence[TensorErrors]) -> TensorErrors:
    """The worst of the judges' medians.

    Where harmless changes make errors of two sizes, since rounding switches a maximum or a ReLU at some states and at
    others doesn't, each judge's median is of one size or the other by chance: there it is the median over the states of
    the worst at each.
    """
    floor, largest, usual = (
        largest_errors([_median_errors(one) for one in judges]),
        largest_errors(rounding),
        _median_errors(rounding),
    )
    jumping = {key for key, error in floor.items() if largest.get(key, 0.0) > _JUMP_RATIO * max(error, FLOAT32_UNIT)}
    return floor | {key: max(floor[key], usual[key]) for key in jumping}


def _median_errors(errors: Sequence[TensorErrors]) -> dict[Key, float]:
    keys = {key for one in errors for key in one}
    return {key: statistics.median(one[key] for one in errors if key in one) for key in keys}
