"""Number of steps between checks of the training loop, and times of checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hotloop.core.format import _UNITS, parse_seconds
from hotloop.core.records.training import EpochRecord
from hotloop.errors import PlanError, shorten

_SPAN_S = 0.1
"""Seconds of a span: long enough for its fixed costs, short enough for a progress bar and Ctrl-C."""

RANKS_SPAN_S = 0.3
"""Seconds of a span of several ranks, which exchange a message before each span."""

_ASSUMED_WRITE_BYTES_PER_S = 300e6
"""Assumed speed of the disk before the first checkpoint; only the time of that checkpoint depends on this speed."""


@dataclass
class SpanPacer:
    """Chooses a span's steps from the measured seconds of a step.

    Attributes:
        step_s: seconds of a step, smoothed; None before the first span.
        last_s: seconds of the last span.
    """

    step_s: float | None = None
    span_s: float = _SPAN_S
    last_s: float = 0.0

    def steps(self) -> int:
        return 1 if self.step_s is None else max(1, int(self.span_s / max(self.step_s, 1e-7)))

    def record_span(self, steps: int, elapsed_s: float) -> None:
        self.last_s = elapsed_s
        if steps:
            now = elapsed_s / steps
            self.step_s = now if self.step_s is None else 0.7 * self.step_s + 0.3 * now

    def remaining_s(
        self, history: Sequence[EpochRecord], epochs: int, batches: int | None, done: int = 0
    ) -> float | None:
        """Estimates the seconds of `epochs` epochs after `done` steps of the first; None while unknown."""
        if batches is None or self.step_s is None:
            return None
        evaluation_s = sum(r.seconds - r.samples / r.samples_per_s for r in history[-1:] if r.samples_per_s)
        return max(0.0, (epochs * batches - done) * self.step_s + epochs * max(0.0, evaluation_s))


@dataclass
class CheckpointCadence:
    """Decides when a checkpoint is due: each `steps` steps, each `seconds` seconds, or at a cost of `share` of the time."""

    steps: int | None = None
    seconds: float | None = None
    share: float = 0.01
    cost_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    @classmethod
    def parse(cls, text: str) -> CheckpointCadence:
        """Reads `auto`, a number of steps such as `500`, or a time such as `90s`."""
        if text == "auto":
            return cls()
        if re.fullmatch(r"[0-9]{1,18}", text) and int(text) > 0:
            return cls(steps=int(text))
        if text[-1:] in _UNITS:
            return cls(seconds=parse_seconds(text, "checkpoint-every"))
        raise PlanError(f"checkpoint-every={shorten(text)}", expected="auto, a number of steps, or a time such as 90s")

    def steps_left(self, step: int) -> int | None:
        """Returns the steps until a checkpoint is due; None if checkpoints go by time."""
        return None if self.steps is None else self.steps - step % self.steps

    def is_due(self, step: int) -> bool:
        if self.steps is not None:
            return step % self.steps == 0
        return time.monotonic() - self._last >= self.interval_s

    @property
    def interval_s(self) -> float:
        return self.seconds if self.seconds is not None else max(5.0, self.cost_s / self.share)

    def estimate_cost(self, nbytes: int) -> None:
        self.cost_s = nbytes / _ASSUMED_WRITE_BYTES_PER_S

    def record_cost(self, cost_s: float) -> None:
        """Records the seconds of a checkpoint, from the copy of the State to the durable file."""
        self.cost_s = cost_s if not self.cost_s else max(cost_s, 0.5 * (cost_s + self.cost_s))
        self._last = time.monotonic()
