"""The free run: some steps on end, across the end of an epoch, each with its own feed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hotloop.errors import blame, out_of_memory
from hotloop.lowering import Program
from hotloop.parity.path import before_the_end, of_the_baseline
from hotloop.parity.witnesses import Witness
from hotloop.state import State, differences

STEPS = 10
_BEFORE = 5
"""Steps before the end of the epoch."""

NUDGES = 4
"""Free runs of the baseline a rounding off."""


@dataclass(frozen=True)
class Freely:
    """How a candidate's free run ended.

    Attributes:
        steps: how many there were.
        apart: its distance from the baseline's end, as a share of the way that the baseline's parameters went.
        rounding: the same of baselines that differ harmlessly, the worst of them.
        bitwise: whether it ended in the baseline's State.
        other: what had to be equal and wasn't.
    """

    steps: int
    apart: float
    rounding: float
    bitwise: bool
    other: str | None


@dataclass(frozen=True)
class _End:
    state: State
    spans: tuple[tuple[int, int], ...]


def run_freely(
    start: State,
    witnesses: Sequence[Witness],
    peers: Sequence[Witness],
    candidates: Sequence[Program],
    nudges: int = NUDGES,
) -> list[Freely]:
    """Runs on from `start` with everyone; rounding is that of the peers, if there are any."""
    plain = witnesses[0].program
    start = before_the_end(start, plain.feed.batches, _BEFORE)
    plain.restore(start)
    left = plain.schedule_left()
    steps = STEPS if left is None else min(STEPS, left)
    with of_the_baseline(plain):
        expected = _ended(plain, start, steps)
    way = _distance(expected.state, start)
    drifts = [_distance(end.state, expected.state) for end in _drifting(start, peers or witnesses, steps, nudges)]
    return [_tried(program, start, expected, way, max(drifts), steps) for program in candidates]


def _tried(program: Program, start: State, expected: _End, way: float, rounding: float, steps: int) -> Freely:
    try:
        ended = _ended(program, start, steps)
    except Exception as error:
        if out_of_memory(error):
            raise
        other = f"its free run raised {blame(error)}, which the baseline's doesn't"
        return Freely(steps, float("inf"), rounding / (way or 1.0), bitwise=False, other=other)
    return _compared(ended, expected, way, rounding, steps)


def _drifting(start: State, witnesses: Sequence[Witness], steps: int, nudges: int) -> Iterator[_End]:
    """Where harmless differences lead to."""
    for witness in witnesses:
        for number in range(nudges if witness.name == "nudged" else 1):
            with witness.around():
                yield _ended(witness.program, witness.state(start, number), steps)


def _ended(program: Program, start: State, steps: int) -> _End:
    program.restore(start)
    program.seed_all()
    left, spans = steps, []
    while left:
        outcome = program.advance(left)
        spans.append((outcome.steps, outcome.samples))
        left -= outcome.steps
        if outcome.ended and left:
            program.end_epoch(1.0)
    return _End(program.state(), tuple(spans))


def _compared(ended: _End, expected: _End, way: float, rounding: float, steps: int) -> Freely:
    paths = differences(ended.state, expected.state)
    return Freely(
        steps=steps,
        apart=_distance(ended.state, expected.state) / (way or 1.0),
        rounding=rounding / (way or 1.0),
        bitwise=not paths,
        other=_unequal(ended, expected, paths),
    )


def _unequal(ended: _End, expected: _End, paths: list[str]) -> str | None:
    if ended.spans != expected.spans:
        spans = [
            ", then ".join(f"{samples} samples in {steps} steps" for steps, samples in one.spans)
            for one in (ended, expected)
        ]
        return f"it trained on {spans[0]}, where the baseline trained on {spans[1]}"
    exact = ("/position", "/schedule", "/sums/samples", "/optimizer/groups")
    found = [path for path in paths if path.startswith(exact)]
    return f"{found[0].strip('/')} is another than the baseline's" if found else None


def _distance(one: State, other: State) -> float:
    squares = [
        torch.linalg.vector_norm(
            value.to(torch.complex128 if value.is_complex() else torch.float64) - other.parameters[name]
        ).item()
        ** 2
        for name, value in one.parameters.items()
    ]
    total = sum(squares) ** 0.5
    return float("inf") if total != total else total
