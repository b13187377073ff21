"""How far this process is in its training, for a watchdog in another thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Progress:
    """The place of one process, which has one training at a time.

    Attributes:
        phase: `start`, `training`, `evaluation`, `checkpoint`, `callbacks` or `end`.
        step: number of the step that runs, or that ran last, from 0.
        steps: steps that this process has begun.
        batches: batches of evaluations that this process has begun.
        longest_s: seconds of the longest step, with the wait for its batch; 0 before one is done.
    """

    phase: str = "start"
    step: int = 0
    steps: int = 0
    batches: int = 0
    longest_s: float = 0.0
    _began: float = 0.0

    def begin_step(self, number: int) -> None:
        """Records that a step begins; the step before, if it was the one before, has ended."""
        now = time.monotonic()
        if self.phase == "training" and self.steps and number == self.step + 1:
            self.longest_s = max(self.longest_s, now - self._began)
        self.phase, self.step, self._began = "training", number, now
        self.steps += 1

    def begin_batch(self) -> None:
        """Records that a batch of an evaluation begins."""
        self.batches += 1

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Records a phase until the end; as a decorator, for each call."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase, self._began = before, time.monotonic()  # the time of the phase is none of the step's


PROGRESS = Progress()
"""Of this process."""
