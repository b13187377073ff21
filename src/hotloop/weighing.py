"""Whether compiling a step pays in this run: some steps are timed on one batch, eagerly, and once more compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hotloop.data.feed import Treatment, open_feed
from hotloop.errors import blame
from hotloop.lowering import Program
from hotloop.measuring.runner import Runner
from hotloop.rng import preserved
from hotloop.tuning.bounds import compiling_gains, makeup
from hotloop.tuning.budget import COLD_COMPILE_S, REALISED

COMPILE_S = 2 * COLD_COMPILE_S
"""What a compilation is reckoned at where nothing was raced: large models, and busy machines, take a minute and more."""

_GLANCE_S, _LOOK_S = 0.05, 0.2
"""For a first idea of a step, which tells that most short runs are too short; and to compare it with a compiled one."""


@dataclass(frozen=True)
class Hope:
    """What compiling may save.

    Attributes:
        steps: of the run that is left.
        step_s: seconds of an eager step, without making its batch, which no compiler makes faster.
        gain: by what factor a compiled step may be faster; None if even one of no time would not pay.
    """

    steps: int
    step_s: float
    gain: float | None = None

    @property
    def wins_s(self) -> float:
        """Seconds of the run that may be saved."""
        return REALISED * self.steps * self.step_s * (1.0 if self.gain is None else 1 - 1 / self.gain)

    @property
    def pays(self) -> bool:
        return self.gain is not None and self.wins_s > COMPILE_S

    def __str__(self) -> str:
        most = "can save at most" if self.gain is None else "should save about"
        return (
            f"a step takes {milliseconds(self.step_s)}, so compiling {most} {self.wins_s:,.0f} s"
            f" of the {self.steps:,} steps left, and may take {COMPILE_S:.0f} s"
        )


def hoped(program: Program, steps: int) -> Hope | str:
    """What compiling may save of so many steps of an eager Program, whose State stays; or why nobody knows."""
    try:
        with _on_one_batch(program):
            hope = Hope(steps, Runner(program).warm_up(_GLANCE_S)[1])
            if hope.wins_s < COMPILE_S:
                return hope
            step_s = Runner(program).warm_up(_LOOK_S)[1]
            return Hope(steps, step_s, compiling_gains(makeup(program), step_s))
    except Exception as error:  # what is wrong with the Task shows in training, and is explained there
        return f"its steps couldn't be timed ({blame(error)})"


def step_seconds(program: Program) -> float:
    """What a step of a Program takes on one batch; its State stays."""
    with _on_one_batch(program):
        return Runner(program).warm_up(_LOOK_S)[1]


def milliseconds(seconds: float) -> str:
    """`0.123 ms`."""
    return f"{seconds * 1e3:.3g} ms"


@contextmanager
def _on_one_batch(program: Program) -> Iterator[None]:
    """Has the Program run on its first batch again and again; generators stay as they are, and no data is run through."""
    parts, own = program.parts, program.feed
    treatment = Treatment(parts.device, parts.task.seed, parts.roles.prepare, parts.task.augment)
    with preserved(*program.devices):
        feed = open_feed(parts.roles.train, parts.roles.order, treatment, workers=0)
        program.feed = _Again(*next(feed.epoch(0)), own.batches)
        feed.close()
        try:
            yield
        finally:
            program.feed = own


class _Again:
    """A feed of one batch, as often as an epoch has batches."""

    reseeds = False

    def __init__(self, batch: Any, samples: int, batches: int | None) -> None:
        self.batch, self.samples, self.batches = batch, samples, batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        numbers = itertools.count(start) if self.batches is None else range(start, self.batches)
        for _ in numbers:
            yield self.batch, self.samples

    def close(self) -> None:
        pass
