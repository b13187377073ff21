"""From the evidence to one of the five classes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hotloop.core.records.race import STATES, TensorError
from hotloop.parity.comparison import KINDS, UNIT, Key
from hotloop.parity.evidence import Account, Errors, Evidence
from hotloop.parity.free_run import Drift, Freely
from hotloop.parity.step_collector import at_one_state, ratio, worst

# Fixed on five architectures and tried on five others: bench/parity_thresholds.py, docs/parity.md.
TYPICAL = 4.0
"""Times the floor that the median error of a tensor may be."""

ANYWHERE = 32.0
"""Times what rounding does at a state that the error there may be."""

_JUMP = 8.0
"""Times the floor from which on the largest error of a harmless change is one of another kind."""

FREELY = 8.0
"""Times the drift of the harmless baselines that a free run may end away from theirs."""

IN_PRECISION = 8.0
"""In place of the last two in a reduced precision, where rounding itself is large."""

SHOWN = 50


def judged(account: Account, evidence: Evidence, free: Freely | None) -> dict[str, Any]:
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
    known: dict[str, Any] = {"errors": typical(account, evidence.baselines, of_fp32)[:SHOWN], "reductions": reduced}
    if account.arithmetic is not None:
        known["arithmetic"] = account.arithmetic.lowest
    table = typical(account, evidence.judges, evidence.rounding)
    if (wrong := _wrong(account, evidence, table)) is not None:
        if reduced:
            wrong["reason"] += f"; {_fewer_bits(evidence, reduced)}"
        return known | wrong
    far = None if free is None else free.beyond(IN_PRECISION if evidence.peers else FREELY)
    if free is not None and (free.other or far):
        return known | {"parity": "broken", **_drifted(free, far)}
    if free is not None and free.count is not None:
        reason = f"{free.count.strip('/')} is another number than the baseline's after {free.steps} free steps"
        return known | {"parity": "unproven", "reason": reason}
    if (reason := _incomparable(account, evidence, table)) is not None:
        return known | {"parity": "unproven", "reason": reason}
    bitwise = not reduced and not evidence.followed and account.differs is None and (free is None or free.bitwise)
    return known | _fine(account, table, bitwise, evidence, 0 if free is None else free.steps)


def _drifted(free: Freely, far: Drift | None) -> dict[str, str]:
    """Where a free run ended in another State."""
    if free.other or far is None:
        return {"reason": free.other or "", "first": f"the parameters, within {free.steps} steps"}
    reason = (
        f"after {free.steps} free steps {far.what} are {far.apart:.2g} of their way from the baseline's, where"
        f" rounding alone comes to {far.rounding:.2g}"
    )
    return {"reason": reason, "first": f"{far.what}, within {free.steps} steps"}


def _incomparable(account: Account, evidence: Evidence, table: Sequence[TensorError]) -> str | None:
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


def _fine(
    account: Account, table: Sequence[TensorError], bitwise: bool, evidence: Evidence, free_steps: int
) -> dict[str, Any]:
    """The class of a candidate in which nothing is wrong."""
    reduced = evidence.reductions(account)
    largest, states = max((one.ratio for one in table), default=0.0), len(evidence.steps)
    compared = f"{states} single steps" if states >= STATES else f"all {states} single steps of the training"
    if bitwise:
        reason = f"in {compared} and a free run of {free_steps}, each bit is the baseline's"
        return {"parity": "bitwise", "reason": reason}
    if evidence.peers:
        of_fp32 = max((one.ratio for one in typical(account, evidence.baselines, [])), default=0.0)
        beside = (
            "and larger than the baseline's"
            if of_fp32 > TYPICAL
            else "and no larger than the baseline's, as it happens"
        )
        reason = (
            f"{_fewer_bits(evidence, reduced)}: in {compared} its errors are at most {max(largest, 0.1):.1f} times those of"
            f" the eager step in that precision (allowed: {TYPICAL:g}), {beside}"
        )
        return {"parity": "reduced-precision", "reason": reason}
    if reduced:
        reason = (
            f"{_fewer_bits(evidence, reduced)}: in {compared} its errors are at most {max(largest, 0.1):.1f} times what"
            f" harmless changes of the baseline come to (allowed: {TYPICAL:g})"
        )
        return {"parity": "reduced-precision", "reason": reason}
    reason = (
        f"in {compared} no tensor is further from float64 than {max(largest, 0.1):.1f} times what harmless changes of"
        f" the baseline come to (allowed: {TYPICAL:g})"
    )
    if evidence.followed:
        reason += f"; the baseline drew the plan's random numbers, {evidence.followed}"
    if account.drawn:
        reason += "; what it draws has the baseline's rate and scale and is independent"
    return {"parity": "fp32-equivalent", "reason": reason}


def _fewer_bits(evidence: Evidence, reduced: Sequence[str]) -> str:
    """What a plan computes in fewer bits than the baseline, and whether it was asked to."""
    asked = "as it was asked to" if evidence.asked else "which its plan doesn't ask for"
    return f"{' and '.join(reduced) or 'it rounds to fewer bits'}, {asked}"


def _wrong(account: Account, evidence: Evidence, table: Sequence[TensorError]) -> dict[str, Any] | None:
    """The class `broken`, with the first tensor and step that went wrong."""
    off = {(one.what, one.name) for one in table if one.ratio > TYPICAL}
    limit = IN_PRECISION if evidence.peers else ANYWHERE
    for step, errors, floor in zip(
        evidence.steps, account.errors, floors(evidence.rounding, evidence.closer), strict=True
    ):
        far = {key for key, error in errors.items() if ratio(error, floor.get(key)) > limit}
        wrong = far | {key for key in off if ratio(errors.get(key, 0.0), floor.get(key)) > TYPICAL}
        if wrong:
            what, name = min(wrong, key=lambda key: (KINDS.index(key[0]), -errors[key]))
            times = ratio(errors[what, name], floor.get((what, name)))
            size = "differs altogether" if times == float("inf") else f"is {times:.3g} times what rounding comes to"
            first = f"{what} {name!r} at step {step + 1}"
            return {"parity": "broken", "reason": f"the error of the {first} {size}", "first": first}
    if off:  # its median is, though at no state by itself
        what, name = min(off, key=lambda key: KINDS.index(key[0]))
        first = f"{what} {name!r} at step {evidence.steps[0] + 1}"
        return {"parity": "broken", "reason": f"the typical error of the {what} {name!r} is too large", "first": first}
    return None


def floors(rounding: Sequence[Errors], closer: Sequence[Errors] = ()) -> list[Errors]:
    """At each state what rounding does there, and no less than usual: of a single number, such as a loss, it may cancel.

    Args:
        closer: what it does where more nudges were tried, if they were.
    """
    usual = {key: error for key, error in _medians(rounding).items() if error != float("inf")}
    return [worst([at_one_state(here), usual]) for here in closer or rounding]


def typical(account: Account, judges: Sequence[Account], rounding: Sequence[Errors]) -> list[TensorError]:
    """The median errors over the states against the floor that the judges make at the same ones, worst first.

    What a compiled step keeps to itself, such as gradients, is seen at those states alone where the step runs eagerly.
    """
    own = account.of_its_own
    floor = _floor([_where_seen(own, one.errors) for one in judges], _where_seen(own, rounding))
    found = _medians(own)
    rows = [
        TensorError(
            what=what,
            name=name,
            error=error,
            floor=floor.get((what, name), 0.0),
            ratio=ratio(error, floor.get((what, name))),
        )
        for (what, name), error in found.items()
    ]
    return sorted(rows, key=lambda row: -row.ratio)


def _where_seen(own: Sequence[Errors], errors: Sequence[Errors]) -> list[Errors]:
    """Errors at each state of what the plan's own errors have there, too."""
    return [{key: one[key] for key in one if key in seen} for one, seen in zip(errors, own, strict=False)]


def _floor(judges: Sequence[Sequence[Errors]], rounding: Sequence[Errors]) -> Errors:
    """The worst of the judges' medians.

    Where harmless changes make errors of two sizes, since rounding switches a maximum or a ReLU at some states and at
    others doesn't, each judge's median is of one size or the other by chance: there it is the median over the states of
    the worst at each.
    """
    floor, largest, usual = worst([_medians(one) for one in judges]), worst(rounding), _medians(rounding)
    jumping = {key for key, error in floor.items() if largest.get(key, 0.0) > _JUMP * max(error, UNIT)}
    return floor | {key: max(floor[key], usual[key]) for key in jumping}


def _medians(errors: Sequence[Errors]) -> dict[Key, float]:
    keys = {key for one in errors for key in one}
    return {key: statistics.median(one[key] for one in errors if key in one) for key in keys}
