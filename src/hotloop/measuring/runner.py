"""One Program in a race: it runs windows of steps, and is put back to how it was."""

from __future__ import annotations

import time
from dataclasses import replace

from hotloop.lowering import Outcome, Program
from hotloop.measuring.clocks import Clock, synchronise
from hotloop.measuring.loading import loading_workers
from hotloop.state import Position

WARM_S = 0.5
"""What processors and allocators take to come into their stride."""

_WARM_STEPS = 3

_LONG_S = 1.0
"""Two steps that last longer warm up all that there is to warm."""


class Runner:
    """Times steps of a Program, which trains on meanwhile; where its run ends, it begins again outside of the clock.

    Attributes:
        samples, steps: what was trained on within the clock, and in how many steps.
    """

    def __init__(self, program: Program, clock: Clock = time.perf_counter) -> None:
        self.program = program
        self.samples, self.steps = 0, 0
        self._clock = clock
        self._start = program.state()
        self._begun_at = self._start.position.epoch  # the epoch of the data at which the run began last
        self._cold = True

    def warm_up(self, seconds: float = WARM_S) -> tuple[float, float]:
        """Runs until the first steps' costs are over, then puts the State back: `(first step, a step)` in seconds."""
        first, _ = self._run(1)
        total, done, rate = 0.0, 1, first
        while steps := self._to_warm_up(seconds - total, done, rate):
            took, _ = self._run(steps)
            total, done, rate = total + took, done + steps, took / steps
        self.put_back()
        return first, rate

    def _to_warm_up(self, left_s: float, done: int, rate: float) -> int:
        """Steps to come next, 0 at the end; of several ranks, which take each step together, as the first has it."""
        least = _WARM_STEPS if rate < _LONG_S else _WARM_STEPS - 1
        steps = max(1, min(done, int(left_s / max(rate, 1e-7)))) if left_s > 0 or done < least else 0
        return self.program.parts.world.of_first(steps)

    def glance(self, seconds: float) -> tuple[float, float]:
        """Warms up: `(a step, copying the State out and back)` in seconds."""
        _, step_s = self.warm_up(seconds)
        began = self._clock()
        self.program.restore(self.program.state())
        return step_s, self._clock() - began

    def put_back(self) -> None:
        """Goes to the State from before."""
        self.program.restore(self._start)
        self._begun_at, self._cold = self._start.position.epoch, True

    def settle(self, steps: int) -> None:
        """Runs steps that don't count, since another plan was there before: caches, threads, clocks of the device."""
        if self.program.prime():
            steps = max(steps, 1)
        first = max(1, 2 * loading_workers(self.program))  # what workers start with is not their pace
        self._run(max(steps, first) if self._cold else steps)
        self._cold = False

    def window(self, steps: int) -> float:
        """Seconds that so many steps take, with the device waited for at both ends."""
        seconds, samples = self._run(steps)
        self.steps, self.samples = self.steps + steps, self.samples + samples
        return seconds

    def _run(self, steps: int) -> tuple[float, int]:
        """Runs so many steps: `(seconds, samples)`."""
        seconds, samples, left = 0.0, 0, steps
        while left:
            took, outcome = self._span(left)
            seconds, samples, left = seconds + took, samples + outcome.samples, left - outcome.steps
        return seconds, samples

    def _span(self, steps: int) -> tuple[float, Outcome]:
        """Runs up to `steps` steps, not past the end of an epoch."""
        program = self.program
        self.ready()
        synchronise(*program.devices)
        began = self._clock()
        outcome = program.advance(steps)
        if outcome.ended:
            program.end_epoch(1.0)
        synchronise(*program.devices)
        return self._clock() - began, outcome

    def ready(self) -> None:
        """Makes sure that there is a step to run."""
        if self.program.position.epoch - self._begun_at >= self.program.parts.task.epochs:
            self._begin_again()

    def _begin_again(self) -> None:
        """Goes to the beginning of training, at the next epoch of the data, so that its loaders go on as they are."""
        epoch = self.program.position.epoch + (1 if self.program.position.batch else 0)
        self.program.restore(replace(self._start, position=Position(epoch=epoch)))
        self._begun_at = epoch
