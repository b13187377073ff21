"""Classification of a candidate from the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hotloop.core.records.race import STATES, TensorError
from hotloop.margins import FREE_RUN_LIMIT, REDUCED_PRECISION_LIMIT, TYPICAL_LIMIT, WORST_LIMIT
from hotloop.parity.comparison import KINDS, Evidence, StepErrors
from hotloop.parity.free_run import FreeRunResult, KindDrift
from hotloop.parity.noise_floor import noise_floors, typical_errors
from hotloop.parity.step_collector import floor_ratio

MAX_SHOWN_ERRORS = 50


def classify(candidate: StepErrors, evidence: Evidence, free: FreeRunResult | None) -> dict[str, Any]:
    """Returns class, reason and figures of one candidate."""
    if reason := evidence.unproven or candidate.unproven:
        return {"parity": "unproven", "reason": reason, "short_of_memory": candidate.short_of_memory}
    if candidate.failed:
        reason = f"its {candidate.failed}, which the baseline's doesn't"
        return {"parity": "broken", "reason": reason, "first": candidate.failed.partition(" raised ")[0]}
    if candidate.draws:
        return {"parity": "broken", "reason": f"its {candidate.draws}", "first": candidate.draws.partition(" (")[0]}
    of_fp32 = [] if evidence.peers else evidence.rounding
    reduced = evidence.reductions(candidate)
    known: dict[str, Any] = {
        "errors": typical_errors(candidate, evidence.baselines, of_fp32)[:MAX_SHOWN_ERRORS],
        "reductions": reduced,
    }
    if candidate.arithmetic is not None:
        known["arithmetic"] = candidate.arithmetic.lowest
    table = typical_errors(candidate, evidence.judges, evidence.rounding)
    if (wrong := _class_broken(candidate, evidence, table)) is not None:
        if reduced:
            wrong["reason"] += f"; {_describe_reduction(evidence, reduced)}"
        return known | wrong
    far = None if free is None else free.drifts_beyond(REDUCED_PRECISION_LIMIT if evidence.peers else FREE_RUN_LIMIT)
    if free is not None and (free.other or far):
        return known | {"parity": "broken", **_classify_drift(free, far)}
    if free is not None and free.count is not None:
        reason = f"{free.count.strip('/')} differs from the baseline's number after {free.steps} free steps"
        return known | {"parity": "unproven", "reason": reason}
    if (reason := _why_incomparable(candidate, evidence, table)) is not None:
        return known | {"parity": "unproven", "reason": reason}
    bitwise = (
        not reduced and not evidence.shared_draws and candidate.differs is None and (free is None or free.is_bitwise)
    )
    return known | _class_without_errors(candidate, table, bitwise, evidence, 0 if free is None else free.steps)


def _classify_drift(free: FreeRunResult, far: KindDrift | None) -> dict[str, str]:
    if free.other or far is None:
        return {"reason": free.other or "", "first": f"the parameters, within {free.steps} steps"}
    reason = (
        f"after {free.steps} free steps {far.what} are {far.apart:.2g} of their way from the baseline's, where"
        f" rounding alone causes {far.rounding:.2g}"
    )
    return {"reason": reason, "first": f"{far.what}, within {free.steps} steps"}


def _why_incomparable(candidate: StepErrors, evidence: Evidence, table: Sequence[TensorError]) -> str | None:
    """Returns why a tensor has no floor, though it isn't bitwise the eager step's; None if there is no such tensor."""
    rows = [row for row in table if row.floor == math.inf and (row.what, row.name) in candidate.unequal]
    if not rows:
        return None
    row = min(rows, key=lambda row: KINDS.index(row.what))
    tensor = "the eager step's in that precision" if evidence.peers else "the baseline's or that of a harmless change"
    return (
        f"the {row.what} {row.name!r} can't be compared: {tensor} differs altogether from that in float64, and the plan's"
        " isn't bitwise equal"
    )


def _class_without_errors(
    candidate: StepErrors, table: Sequence[TensorError], bitwise: bool, evidence: Evidence, free_steps: int
) -> dict[str, Any]:
    reduced = evidence.reductions(candidate)
    largest, states = max([0.1, *(row.ratio for row in table)]), len(evidence.steps)
    compared = f"{states} single steps" if states >= STATES else f"all {states} single steps of the training"
    limit = f"(limit: {TYPICAL_LIMIT:g})"
    if bitwise:
        reason = f"in {compared} and a free run of {free_steps}, each bit equals the baseline's"
        return {"parity": "bitwise", "reason": reason}
    if evidence.peers or reduced:
        reason = f"{_describe_reduction(evidence, reduced)}: in {compared} its errors are at most {largest:.1f} times"
        if evidence.peers:
            of_fp32 = max((row.ratio for row in typical_errors(candidate, evidence.baselines, [])), default=0.0)
            size = "larger" if of_fp32 > TYPICAL_LIMIT else "no larger"
            reason += f" those of the eager step in that precision {limit}, and {size} than the baseline's"
        else:
            reason += f" the baseline's rounding noise {limit}"
        return {"parity": "reduced-precision", "reason": reason}
    reason = (
        f"in {compared} the largest error against float64 is {largest:.1f} times the baseline's rounding noise {limit}"
    )
    if evidence.shared_draws:
        reason += f"; the baseline drew the plan's random numbers, {evidence.shared_draws}"
    if candidate.has_tested_draws:
        reason += "; the plan's random numbers have the baseline's rate and scale, and are independent"
    return {"parity": "fp32-equivalent", "reason": reason}


def _describe_reduction(evidence: Evidence, reduced: Sequence[str]) -> str:
    asked = "as it was asked to" if evidence.requested else "which its plan doesn't ask for"
    return f"{' and '.join(reduced) or 'it rounds to fewer bits'}, {asked}"


def _class_broken(candidate: StepErrors, evidence: Evidence, table: Sequence[TensorError]) -> dict[str, Any] | None:
    off = {(one.what, one.name) for one in table if one.ratio > TYPICAL_LIMIT}
    limit = REDUCED_PRECISION_LIMIT if evidence.peers else WORST_LIMIT
    for step, errors, floor in zip(
        evidence.steps, candidate.errors, noise_floors(evidence.rounding, evidence.nudged_rounding), strict=True
    ):
        far = {key for key, error in errors.items() if floor_ratio(error, floor.get(key)) > limit}
        wrong = far | {key for key in off if floor_ratio(errors.get(key, 0.0), floor.get(key)) > TYPICAL_LIMIT}
        if wrong:
            what, name = min(wrong, key=lambda key: (KINDS.index(key[0]), -errors[key]))
            times = floor_ratio(errors[what, name], floor.get((what, name)))
            size = "differs altogether" if times == float("inf") else f"is {times:.3g} times the rounding noise"
            first = f"{what} {name!r} at step {step + 1}"
            return {"parity": "broken", "reason": f"the error of the {first} {size}", "first": first}
    if off:  # the median error is too large, though no single one is
        what, name = min(off, key=lambda key: KINDS.index(key[0]))
        first = f"{what} {name!r} at step {evidence.steps[0] + 1}"
        return {"parity": "broken", "reason": f"the typical error of the {what} {name!r} is too large", "first": first}
    return None
