"""Faults of a Program that cuts batches into pieces."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.faults.planting import Planted, around, each
from hotloop.lowering.program import Program


def not_divided(program: Program, draws: random.Random) -> Planted:
    """The losses of the pieces are added, and not averaged."""
    pieces = program.parts.plan.accumulation
    around(program._step, "_backward_of", lambda backward: lambda loss: backward(loss * pieces))
    return "the loss", None


def piece_dropped(program: Program, draws: random.Random) -> Planted:
    turn, every = each(draws)
    around(program._step, "_backward_of", lambda backward: lambda loss: None if turn() else backward(loss))
    return f"each {every} pieces", 1 / every


def last_piece_alone(program: Program, draws: random.Random) -> Planted:
    """Gradients are cleared before each piece."""
    step = program._step
    around(step, "_backward_of", lambda backward: lambda loss: (step._clear_gradients(), backward(loss)))
    return "the gradients", None


FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = {
    "accumulation not divided": not_divided,
    "piece dropped": piece_dropped,
    "last piece alone": last_piece_alone,
}
