"""Faults planted into a Program's eager step: what goes wrong when a training loop is written, or rewritten, by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.faults import batches, gradients, model, pieces, update
from bench.faults.planting import Planted
from bench.graph_mutations import Mutation
from hotloop.lowering.program import Program

FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = (
    gradients.FAULTS | update.FAULTS | model.FAULTS | batches.FAULTS
)

OF_PIECES: dict[str, Callable[[Program, random.Random], Planted]] = {
    **pieces.FAULTS,
    **{
        name: FAULTS[name]
        for name in ("zero_grad skipped", "loss scaled", "gradient scaled", "learning rate off", "stale learning rate")
    },
}
"""Of a Program that cuts batches into pieces."""


def planted(program: Program, draws: random.Random) -> Mutation:
    """Plants one at random."""
    faults = FAULTS if program.parts.plan.accumulation == 1 else OF_PIECES
    while True:
        kind = draws.choice(list(faults))
        found = faults[kind](program, draws)
        if found is not None:
            return Mutation(kind, *found)
