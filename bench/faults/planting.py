"""How a fault is planted into a Program's eager step: around a method, at each so many steps, of some size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torch import nn

from bench.graph_mutations import magnitude
from hotloop.lowering.program import Program

Planted = tuple[str, float | None] | None
"""Where, and how large; None where the Task has no place for such a fault."""

OFTEN = (1, 2, 4, 8, 16)
"""A fault of each so many steps."""


def around(holder: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replaces a method of this one object by what `make` makes of it."""
    setattr(holder, name, make(getattr(holder, name)))


def each(draws: random.Random) -> tuple[Callable[[], bool], int]:
    """Whether it is the turn of a fault, which is each so many calls."""
    every, count = draws.choice(OFTEN), [0]

    def turn() -> bool:
        count[0] += 1
        return count[0] % every == 0

    return turn, every


def a_factor(draws: random.Random) -> tuple[float, float]:
    size = magnitude(draws)
    return 1 + draws.choice((-1, 1)) * size, size


def a_parameter(program: Program, draws: random.Random) -> tuple[str, nn.Parameter]:
    return draws.choice([pair for pair in program.model.named_parameters() if pair[1].requires_grad])
