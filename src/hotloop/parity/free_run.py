"""The free run: some steps on end, across the end of an epoch, each with its own feed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotloop.core.state import State, differing_paths, tree_leaves
from hotloop.errors import describe_error, is_out_of_memory
from hotloop.lowering.program import Program
from hotloop.parity.comparison import FLOAT32_UNIT, difference_norm, is_real, to_float64
from hotloop.parity.references import FARTHER, ReferenceRun, nudge_state, rounding_error
from hotloop.parity.trajectory import state_before_end, translate_baseline_errors

STEPS = 10
_STEPS_BEFORE_END = 5
"""Steps before the end of the epoch."""

NUDGES = 4
"""Free runs of the baseline a rounding off."""

_SUSPICIOUS, _MORE = 8.0, 8
"""Times what rounding came to: from here on so many free runs farther off tell whether it could lead there too."""


@dataclass(frozen=True)
class KindDrift:
    """How far a candidate ended from the baseline in one kind of tensors.

    Attributes:
        what: such as the parameters.
        apart: the distance as a share of the way that the baseline's went.
        rounding: the same of baselines that differ harmlessly, the worst of them; and no less than rounding the numbers
            themselves once in each step, since these baselines compute an optimizer's own state all in the same way.
    """

    what: str
    apart: float
    rounding: float

    @property
    def times(self) -> float:
        """The distance in multiples of what rounding comes to."""
        return self.apart / max(self.rounding, FLOAT32_UNIT)


@dataclass(frozen=True)
class FreeRunResult:
    """How a candidate's free run ended.

    Attributes:
        steps: how many there were.
        drifts: of each kind of tensors; none if it didn't come to its end.
        bitwise: whether it ended in the baseline's State.
        other: what had to be equal and wasn't.
        count: a whole number or a flag that is another, though it is the same under all harmless changes: a fault, or an
            answer that rounding has turned there by chance.
    """

    steps: int
    drifts: tuple[KindDrift, ...]
    is_bitwise: bool
    other: str | None
    count: str | None = None

    @property
    def largest_drift(self) -> KindDrift:
        """In multiples of rounding."""
        return max(self.drifts, key=lambda drift: drift.times, default=KindDrift("the parameters", 0.0, 0.0))

    def drifts_beyond(self, limit: float) -> KindDrift | None:
        """The first that is further than so many times what rounding comes to, the parameters before all others."""
        return next((drift for drift in self.drifts if drift.times > limit), None)


@dataclass(frozen=True)
class _RunEnd:
    state: State
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _BaselineDrift:
    """What a candidate's end is held against.

    Attributes:
        expected: the baseline's end.
        rounding: by kind, the largest distance from there of a baseline that differs harmlessly.
        near: those of each that was nudged.
        ways: by kind, how far the baseline went.
        loose: paths of the State at which a harmless difference leads to another value.
    """

    expected: _RunEnd
    rounding: dict[str, float]
    ways: dict[str, float]
    is_loose: frozenset[str]
    is_near: tuple[dict[str, float], ...] = ()


def compare_free_runs(
    start: State,
    witnesses: Sequence[ReferenceRun],
    peers: Sequence[ReferenceRun],
    candidates: Sequence[Program],
    nudges: int = NUDGES,
) -> list[FreeRunResult]:
    """Runs on from `start` with everyone; rounding is that of the peers, if there are any."""
    plain, steps = witnesses[0].program, free_run_steps(candidates)
    plain.restore(start)
    left = plain.steps_left()
    steps = steps if left is None else min(steps, left)
    before = max(_STEPS_BEFORE_END, 2 * _max_steps_per_replay(candidates) + 1)  # the last batch may be a smaller one
    start = state_before_end(start, plain.feed.batches, min(before, max(1, steps // 2)))
    with translate_baseline_errors(plain):
        expected = _run_to_end(plain, start, steps, lent=False)
    ways = _distance_by_kind(expected.state, start, from_zero=True)
    known = _BaselineDrift(expected, _rounding_by_kind(expected.state, steps), ways, frozenset())
    for witness, end in _harmless_ends(start, peers or witnesses, steps, nudges):
        known = _add_baseline(known, end.state, witness)
        del end  # the next begins with an optimizer's state of its own
    looked, found = False, []
    for program in candidates:
        ended = _try_run(program, start, steps)
        found.append(_compare_ends(ended, known, steps))
        if not looked and found[-1].drifts_beyond(_SUSPICIOUS):
            known, looked = _add_larger_nudges(known, start, peers or witnesses, steps), True
            found[-1] = _compare_ends(ended, known, steps)
    return found


def free_run_steps(candidates: Sequence[Program]) -> int:
    """Steps of a free run of these, where the schedule allows them."""
    return max(STEPS, 3 * _max_steps_per_replay(candidates) + 1)


def _max_steps_per_replay(candidates: Sequence[Program]) -> int:
    return max(map(_steps_per_replay, candidates), default=1)


def _steps_per_replay(program: Program) -> int:
    """Steps of one replay: what goes wrong from one to the next shows in a whole one alone."""
    graphs = program.parts.plan.graphs
    return graphs if isinstance(graphs, int) else 1


def _add_baseline(known: _BaselineDrift, drifted: State, witness: ReferenceRun) -> _BaselineDrift:
    """With one more baseline that differs harmlessly."""
    found = _distance_by_kind(drifted, known.expected.state)
    return replace(
        known,
        rounding=_largest_distances(known.rounding, found),
        is_loose=known.is_loose | set(differing_paths(drifted, known.expected.state)),
        is_near=(*known.is_near, found) if witness.unit else known.is_near,
    )


def _add_larger_nudges(
    known: _BaselineDrift, start: State, witnesses: Sequence[ReferenceRun], steps: int
) -> _BaselineDrift:
    """With baselines that are nudged farther: what those that were nudged less have not switched by chance, they may."""
    nudging = next((one for one in witnesses if one.unit), None)
    if nudging is None or not known.is_near:
        return known
    least = _rounding_by_kind(known.expected.state, steps)
    for number in range(_MORE):
        state = nudge_state(start, number + len(known.is_near), FARTHER * nudging.unit)
        with nudging.around():
            ended = _run_to_end(nudging.program, state, steps)
        found = _distance_by_kind(ended.state, known.expected.state)
        near = {what: statistics.median_low([one.get(what, 0.0) for one in known.is_near]) for what in found}
        may = {what: rounding_error(size, max(near[what], least.get(what, 0.0))) for what, size in found.items()}
        known = replace(known, rounding=_largest_distances(known.rounding, may))
    return known


def _largest_distances(known: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    return known | {what: max(known.get(what, 0.0), size) for what, size in found.items()}


def _try_run(program: Program, start: State, steps: int) -> _RunEnd | str:
    """Where it ends, or why it doesn't."""
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
    tight = [path for path in paths if path not in known.is_loose]
    return FreeRunResult(
        steps,
        _kind_drifts(ended.state, known),
        is_bitwise=not paths,
        other=_first_unequal(ended, known, tight),
        count=_first_count_difference(ended.state, expected, tight),
    )


def _harmless_ends(
    start: State, witnesses: Sequence[ReferenceRun], steps: int, nudges: int
) -> Iterator[tuple[ReferenceRun, _RunEnd]]:
    """Where harmless differences lead to; those of the batch alone lead nowhere else, since each run has its own feed."""
    for witness in witnesses:
        if not witness.is_in_order:
            continue
        for number in range(nudges if witness.unit else 1):
            try:
                with witness.around():
                    ended = _run_to_end(witness.program, witness.state(start, number), steps)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue  # whatever else it is, it says nothing of the plan that is proven
            yield witness, ended
            del ended  # the next begins with an optimizer's state of its own


def _run_to_end(program: Program, start: State, steps: int, *, lent: bool = True) -> _RunEnd:
    """Where it ends, in its own memory if `lent`."""
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
    found = []
    for what, apart in _distance_by_kind(state, known.expected.state).items():
        way = known.ways.get(what) or 1.0
        way = way if math.isfinite(way) else 1.0
        found.append(KindDrift(what, apart / way, known.rounding.get(what, 0.0) / way))
    return tuple(found)


_EXACT_PATHS = ("/position", "/schedule", "/sums/samples", "/optimizer/groups", "/extra")
"""What rounding has nothing to do with, as a rule: some optimizers and modules keep there what they computed."""


def _first_unequal(ended: _RunEnd, known: _BaselineDrift, paths: Sequence[str]) -> str | None:
    if ended.spans != known.expected.spans:
        spans = [
            ", then ".join(f"{samples} samples in {steps} steps" for steps, samples in one.spans)
            for one in (ended, known.expected)
        ]
        return f"it trained on {spans[0]}, where the baseline trained on {spans[1]}"
    found = next((path for path in paths if path.startswith(_EXACT_PATHS)), None)
    return None if found is None else f"{found.strip('/')} is another than the baseline's"


def _first_count_difference(one: State, other: State, paths: Sequence[str]) -> str | None:
    """The first of these paths, but for a sum's, at which either State has no number with a fraction."""
    both = [dict(tree_leaves(vars(state))) for state in (one, other)]
    whole = (path for path in paths if not path.startswith("/sums") and not all(is_real(of.get(path)) for of in both))
    return next(whole, None)


def _distance_by_kind(one: State, other: State, *, from_zero: bool = False) -> dict[str, float]:
    """Distance of one State from another, by kind; NaN and infinity are no distance where both have them.

    Args:
        from_zero: whether what the other lacks began with zeros; else that, as another shape, is infinitely far.
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
    """By kind, what rounding each number once in each step comes to."""
    squares: dict[str, float] = {}
    for (what, _), value in _computed_tensors(state):
        size = float(torch.linalg.vector_norm(to_float64(value).nan_to_num(0.0, 0.0, 0.0)))
        unit = max(FLOAT32_UNIT, torch.finfo(value.dtype).eps / 2)  # a sum in float64 is of numbers in fp32
        squares[what] = squares.get(what, 0.0) + (unit * size) ** 2
    return {what: (steps * total) ** 0.5 for what, total in squares.items()}


def _computed_tensors(state: State) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """What is computed, as ((kind, path), tensor); the optimizer's and buffers by the part that they play.

    Of the sums of an epoch the loss: others may count, such as right answers, of which rounding turns one now and then.
    """
    kinds = {"parameters": "the parameters", "average": "the averaged parameters", "outer": "the ranks' momentum"}
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
