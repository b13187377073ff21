"""The free run: several consecutive steps, across the end of an epoch, each Program with its own feed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotloop.core.state import State, differing_paths, tree_leaves
from hotloop.core.tensor_distance import difference_norm, to_float64
from hotloop.errors import describe_error, is_out_of_memory
from hotloop.lowering.program import Program
from hotloop.parity.comparison import FLOAT32_UNIT, is_real
from hotloop.parity.references import FARTHER, ReferenceRun, nudge_state, rounding_error
from hotloop.parity.trajectory import state_before_end, translate_baseline_errors

STEPS = 10
_STEPS_BEFORE_END = 5
"""The free run starts so many steps before the end of an epoch."""

NUDGES = 4
"""Free runs of the baseline with nudged parameters."""

_SUSPICIOUS, _LARGER_NUDGES = 8.0, 8
"""Multiple of the drift by rounding from which on `_LARGER_NUDGES` more free runs are compared."""


@dataclass(frozen=True)
class KindDrift:
    """A candidate's distance from the baseline in one kind of tensors, after a free run.

    Attributes:
        what: the kind, such as the parameters.
        apart: the distance, relative to the distance that the baseline moved.
        rounding: the largest such distance of harmlessly changed baselines, and at least one rounding of each number
            per step, since these baselines compute an optimizer's own state all in the same way.
    """

    what: str
    apart: float
    rounding: float

    @property
    def times(self) -> float:
        """The distance in multiples of the drift by rounding."""
        return self.apart / max(self.rounding, FLOAT32_UNIT)


@dataclass(frozen=True)
class FreeRunResult:
    """The end of a candidate's free run.

    Attributes:
        drifts: one for each kind of tensors; none if the run failed.
        is_bitwise: whether the State equals the baseline's bit by bit.
        other: the difference in values that must be equal, or the error.
        count: path of a whole number or flag that differs, though it is the same under all harmless changes: a fault,
            or a decision that rounding has changed by chance.
    """

    steps: int
    drifts: tuple[KindDrift, ...]
    is_bitwise: bool
    other: str | None
    count: str | None = None

    @property
    def largest_drift(self) -> KindDrift:
        return max(self.drifts, key=lambda drift: drift.times, default=KindDrift("the parameters", 0.0, 0.0))

    def drifts_beyond(self, limit: float) -> KindDrift | None:
        """Returns the first drift of more than `limit` times the drift by rounding, the parameters' first."""
        return next((drift for drift in self.drifts if drift.times > limit), None)


@dataclass(frozen=True)
class _RunEnd:
    state: State
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _BaselineDrift:
    """The baseline's free run, with which candidates are compared.

    Attributes:
        rounding: by kind, the largest distance of a harmlessly changed baseline.
        ways: by kind, the distance that the baseline moved.
        loose_paths: paths of the State at which a harmless change leads to another value.
        nudged_distances: by kind, the distances of each nudged baseline.
    """

    expected: _RunEnd
    rounding: dict[str, float]
    ways: dict[str, float]
    loose_paths: frozenset[str]
    nudged_distances: tuple[dict[str, float], ...] = ()


def compare_free_runs(
    start: State,
    references: Sequence[ReferenceRun],
    peers: Sequence[ReferenceRun],
    candidates: Sequence[Program],
    nudges: int = NUDGES,
) -> list[FreeRunResult]:
    """Runs all Programs freely from `start`; the peers, or else the references, show the drift by rounding."""
    plain, steps = references[0].program, free_run_steps(candidates)
    plain.restore(start)
    left = plain.steps_left()
    steps = steps if left is None else min(steps, left)
    before = max(_STEPS_BEFORE_END, 2 * _max_steps_per_replay(candidates) + 1)  # the last batch may be a smaller one
    start = state_before_end(start, plain.feed.batches, min(before, max(1, steps // 2)))
    with translate_baseline_errors(plain):
        expected = _run_to_end(plain, start, steps, lent=False)
    ways = _distance_by_kind(expected.state, start, from_zero=True)
    known = _BaselineDrift(expected, _rounding_by_kind(expected.state, steps), ways, frozenset())
    for reference, end in _harmless_ends(start, peers or references, steps, nudges):
        known = _add_baseline(known, end.state, reference)
        del end  # frees the optimizer's state before the next run
    has_larger_nudges, results = False, []
    for program in candidates:
        ended = _try_run(program, start, steps)
        results.append(_compare_ends(ended, known, steps))
        if not has_larger_nudges and results[-1].drifts_beyond(_SUSPICIOUS):
            known, has_larger_nudges = _add_larger_nudges(known, start, peers or references, steps), True
            results[-1] = _compare_ends(ended, known, steps)
    return results


def free_run_steps(candidates: Sequence[Program]) -> int:
    """Returns the number of steps of a free run of these Programs; the schedule may allow fewer."""
    return max(STEPS, 3 * _max_steps_per_replay(candidates) + 1)


def _max_steps_per_replay(candidates: Sequence[Program]) -> int:
    return max(map(_steps_per_replay, candidates), default=1)


def _steps_per_replay(program: Program) -> int:
    """Steps of one CUDA graph replay: a fault between its steps shows only in a whole replay."""
    graphs = program.parts.plan.graphs
    return graphs if isinstance(graphs, int) else 1


def _add_baseline(known: _BaselineDrift, drifted: State, reference: ReferenceRun) -> _BaselineDrift:
    found = _distance_by_kind(drifted, known.expected.state)
    return replace(
        known,
        rounding=_largest_distances(known.rounding, found),
        loose_paths=known.loose_paths | set(differing_paths(drifted, known.expected.state)),
        nudged_distances=(*known.nudged_distances, found) if reference.unit else known.nudged_distances,
    )


def _add_larger_nudges(
    known: _BaselineDrift, start: State, references: Sequence[ReferenceRun], steps: int
) -> _BaselineDrift:
    """Adds baselines with larger nudges, which switch a ReLU or maximum that smaller nudges missed by chance."""
    nudging = next((reference for reference in references if reference.unit), None)
    if nudging is None or not known.nudged_distances:
        return known
    least = _rounding_by_kind(known.expected.state, steps)
    for number in range(_LARGER_NUDGES):
        state = nudge_state(start, number + len(known.nudged_distances), FARTHER * nudging.unit)
        with nudging.around():
            ended = _run_to_end(nudging.program, state, steps)
        found = _distance_by_kind(ended.state, known.expected.state)
        near = {what: statistics.median_low([one.get(what, 0.0) for one in known.nudged_distances]) for what in found}
        may = {what: rounding_error(size, max(near[what], least.get(what, 0.0))) for what, size in found.items()}
        known = replace(known, rounding=_largest_distances(known.rounding, may))
    return known


def _largest_distances(known: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    return known | {what: max(known.get(what, 0.0), size) for what, size in found.items()}


def _try_run(program: Program, start: State, steps: int) -> _RunEnd | str:
    try:
        return _run_to_end(program, start, steps)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"its free run raised {describe_error(error)}, which the baseline's doesn't"


def _compare_ends(ended: _RunEnd | str, known: _BaselineDrift, steps: int) -> FreeRunResult:
    if isinstance(ended, str):
        return FreeRunResult(steps, (), is_bitwise=False, other=ended)
    expected = known.expected.state
    paths = differing_paths(ended.state, expected)
    tight = [path for path in paths if path not in known.loose_paths]
    return FreeRunResult(
        steps,
        _kind_drifts(ended.state, known),
        is_bitwise=not paths,
        other=_first_unequal(ended, known, tight),
        count=_first_count_difference(ended.state, expected, tight),
    )


def _harmless_ends(
    start: State, references: Sequence[ReferenceRun], steps: int, nudges: int
) -> Iterator[tuple[ReferenceRun, _RunEnd]]:
    """Yields ends of harmlessly changed baselines; each run has its own feed, so the batch stays as it is."""
    for reference in references:
        if not reference.is_in_order:
            continue
        for number in range(nudges if reference.unit else 1):
            try:
                with reference.around():
                    ended = _run_to_end(reference.program, reference.state(start, number), steps)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue  # the failure of a changed baseline says nothing about the plan
            yield reference, ended
            del ended  # frees the optimizer's state before the next run


def _run_to_end(program: Program, start: State, steps: int, *, lent: bool = True) -> _RunEnd:
    program.restore(start)
    program.seed_all()
    left, spans = steps, []
    while left:
        outcome = program.advance(left)
        spans.append((outcome.steps, outcome.samples))
        left -= outcome.steps
        if outcome.ended and left:
            program.end_epoch(1.0)
    return _RunEnd(program.state(lent=lent), tuple(spans))


def _kind_drifts(state: State, known: _BaselineDrift) -> tuple[KindDrift, ...]:
    drifts = []
    for what, apart in _distance_by_kind(state, known.expected.state).items():
        way = known.ways.get(what) or 1.0
        way = way if math.isfinite(way) else 1.0
        drifts.append(KindDrift(what, apart / way, known.rounding.get(what, 0.0) / way))
    return tuple(drifts)


_EXACT_PATHS = ("/position", "/schedule", "/sums/samples", "/optimizer/groups", "/extra")
"""Paths that rounding usually can't change; some optimizers and modules store computed numbers there."""


def _first_unequal(ended: _RunEnd, known: _BaselineDrift, paths: Sequence[str]) -> str | None:
    if ended.spans != known.expected.spans:
        spans = [
            ", then ".join(f"{samples} samples in {steps} steps" for steps, samples in one.spans)
            for one in (ended, known.expected)
        ]
        return f"it trained on {spans[0]}, where the baseline trained on {spans[1]}"
    found = next((path for path in paths if path.startswith(_EXACT_PATHS)), None)
    return None if found is None else f"{found.strip('/')} differs from the baseline's"


def _first_count_difference(one: State, other: State, paths: Sequence[str]) -> str | None:
    """Returns the first path, except sums, at which either State has no floating-point tensor."""
    both = [dict(tree_leaves(vars(state))) for state in (one, other)]
    whole = (path for path in paths if not path.startswith("/sums") and not all(is_real(of.get(path)) for of in both))
    return next(whole, None)


def _distance_by_kind(one: State, other: State, *, from_zero: bool = False) -> dict[str, float]:
    """Returns the distance of two States by kind; NaN or infinity on both sides counts as equal.

    Args:
        from_zero: whether a tensor that `other` lacks counts as zeros; else its distance is infinite, as for another
            shape.
    """
    squares: dict[str, float] = {}
    mine, theirs = dict(_computed_tensors(one)), dict(_computed_tensors(other))
    for what, path in mine | theirs:
        here, there = mine.get((what, path)), theirs.get((what, path))
        if there is None and from_zero and here is not None:
            there = torch.zeros_like(here)
        if here is None or there is None or here.shape != there.shape:
            size = math.inf
        else:
            size = difference_norm(here, there)
        squares[what] = squares.get(what, 0.0) + size**2
    return {what: math.inf if math.isnan(total) else total**0.5 for what, total in squares.items()}


def _rounding_by_kind(state: State, steps: int) -> dict[str, float]:
    squares: dict[str, float] = {}
    for (what, _), value in _computed_tensors(state):
        size = float(torch.linalg.vector_norm(to_float64(value).nan_to_num(0.0, 0.0, 0.0)))
        unit = max(FLOAT32_UNIT, torch.finfo(value.dtype).eps / 2)  # a sum in float64 is of numbers in fp32
        squares[what] = squares.get(what, 0.0) + (unit * size) ** 2
    return {what: (steps * total) ** 0.5 for what, total in squares.items()}


def _computed_tensors(state: State) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yields computed tensors as ((kind, path), tensor); those of the optimizer and of buffers by their role.

    Of an epoch's sums only the loss: others may count, such as correct answers, which rounding changes now and then.
    """
    kinds = {"parameters": "the parameters", "average": "the averaged parameters"}
    for path, value in tree_leaves(vars(state)):
        field, role = path.split("/")[1], path.rpartition("/")[2]
        if path == "/sums/loss" and isinstance(value, float):
            value = torch.tensor(value)
        if not is_real(value):
            continue
        if field in kinds:
            yield (kinds[field], path), value
        elif field in ("buffers", "loss"):
            yield (f"the buffers {role.rpartition('.')[2]!r}", path), value
        elif path == "/sums/loss":
            yield ("the sums of the loss", path), value
        elif path.startswith(("/optimizer/state", "/optimizer/own")):
            yield (f"the optimizer's {role!r}", path), value
