"""The noise floor of a proof: the errors that harmless changes of the baseline cause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hotloop.core.records.race import TensorError
from hotloop.parity.comparison import FLOAT32_UNIT, Key, StepErrors, TensorErrors
from hotloop.parity.step_collector import errors_at_state, floor_ratio, largest_errors

_JUMP_RATIO = 8.0
"""Multiple of the noise floor from which on a harmless change's largest error counts as a switched ReLU or maximum."""


def noise_floors(rounding: Sequence[TensorErrors], closer: Sequence[TensorErrors] = ()) -> list[TensorErrors]:
    """Returns each state's rounding errors, at least their median over the states: a single number's error may cancel.

    Args:
        closer: rounding errors with more nudges, if they were tried.
    """
    usual = {key: error for key, error in _median_errors(rounding).items() if error != float("inf")}
    return [largest_errors([errors_at_state(here), usual]) for here in closer or rounding]


def typical_errors(
    candidate: StepErrors, judges: Sequence[StepErrors], rounding: Sequence[TensorErrors]
) -> list[TensorError]:
    """Returns the median errors over the states and the judges' noise floor at the same states, worst first.

    Tensors that a compiled step doesn't show, such as gradients, are compared only where the step runs eagerly.
    """
    own = candidate.visible_errors
    floor = _noise_floor([_comparable_errors(own, one.errors) for one in judges], _comparable_errors(own, rounding))
    rows = []
    for (what, name), error in _median_errors(own).items():
        noise = floor.get((what, name))
        rows.append(TensorError(what=what, name=name, error=error, floor=noise or 0.0, ratio=floor_ratio(error, noise)))
    return sorted(rows, key=lambda row: -row.ratio)


def _comparable_errors(own: Sequence[TensorErrors], errors: Sequence[TensorErrors]) -> list[TensorErrors]:
    return [
        {key: error for key, error in at_state.items() if key in shown}
        for at_state, shown in zip(errors, own, strict=False)
    ]


def _noise_floor(judges: Sequence[Sequence[TensorErrors]], rounding: Sequence[TensorErrors]) -> TensorErrors:
    """Returns the largest of the judges' medians.

    Rounding may switch a ReLU or a maximum at some states only. Then errors have two sizes, and each judge's median is
    one of both by chance: the floor is the median over the states of the largest error at each.
    """
    floor = largest_errors([_median_errors(errors) for errors in judges])
    largest, usual = largest_errors(rounding), _median_errors(rounding)
    jumping = {key for key, error in floor.items() if largest.get(key, 0.0) > _JUMP_RATIO * max(error, FLOAT32_UNIT)}
    return floor | {key: max(floor[key], usual[key]) for key in jumping}


def _median_errors(errors: Sequence[TensorErrors]) -> dict[Key, float]:
    keys = {key for one in errors for key in one}
    return {key: statistics.median(one[key] for one in errors if key in one) for key in keys}
