"""The training progress of this process, which a watchdog in another thread reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class RankProgress:
    """The progress of one process, which has one training run at a time.

    Attributes:
        phase: `start`, `training`, `evaluation`, `checkpoint`, `callbacks` or `end`.
        step: number of the current or last step, from 0.
        steps: number of steps that this process has begun.
        batches: number of evaluation batches that this process has begun.
        longest_s: seconds of the longest step with the wait for its batch; 0 before the first step ends.
    """

    phase: str = "start"
    step: int = 0
    steps: int = 0
    batches: int = 0
    longest_s: float = 0.0
    _began: float = 0.0

    def begin_step(self, number: int) -> None:
        """Records the begin of a step and the duration of the step before."""
        now = time.monotonic()
        if self.phase == "training" and self.steps and number == self.step + 1:
            self.longest_s = max(self.longest_s, now - self._began)
        self.phase, self.step, self._began = "training", number, now
        self.steps += 1

    def begin_batch(self) -> None:
        """Records the begin of an evaluation batch."""
        self.batches += 1

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Records a phase within the context, or within each call as a decorator."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase, self._began = before, time.monotonic()  # the step's time excludes the phase


RANK_PROGRESS = RankProgress()
