"""Limits what a child process takes from the steps of the training."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hotloop.core.hardware.limits import allowed_cores
from hotloop.core.hardware.machine_load import CpuUsage

MAX_LOSS = 0.15
"""Largest share of the run's time that children may cost."""

_RESUME_SHARE = 0.8
"""Share of the allowed loss at which a paused child goes on."""

_SLACK_S = 0.3
"""Seconds of loss that never pause the child."""

_PERIOD, _ALONE_SPANS = 10, 5
"""Spans beside the child before one without it, and the last spans without it that give the seconds of a step: the
machine's load may change."""


@dataclass
class SpareTime:
    """Pauses the child when the training's steps have lost more than their share of time, and lets it go on later.

    Attributes:
        step_s: seconds of a step without the child.
        most_loss: largest share of the time until now that the child may cost.
        budget_s: seconds that the child may cost at any time, since a later saving outweighs them.
        lost_s, passed_s: seconds that the steps lost, of all seconds since the child's start.
    """

    step_s: float
    pause: Callable[[], None]
    proceed: Callable[[], None]
    most_loss: float = MAX_LOSS
    budget_s: float = 0.0
    lost_s: float = 0.0
    passed_s: float = 0.0
    is_paused: bool = False
    _spans: int = 0
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=_ALONE_SPANS))

    def record(self, steps: int, seconds: float) -> None:
        """Records a span of the training, and pauses the child or lets it go on."""
        if not steps:
            return
        self.passed_s += seconds
        if self.is_paused:
            self._alone.append(seconds / steps)
            self.step_s = statistics.median(self._alone)
        else:
            self._spans += 1
            self.lost_s = max(0.0, self.lost_s + seconds - steps * self.step_s)
        allowed_s = max(self.budget_s, self.most_loss * self.passed_s)
        if self.is_paused and self.lost_s <= _RESUME_SHARE * allowed_s + _SLACK_S:
            self.is_paused, self._spans = False, 0
            self.proceed()
        elif not self.is_paused and (self._spans >= _PERIOD or self.lost_s > allowed_s + _SLACK_S):
            self.is_paused = True
            self.pause()


class IdleCores:
    """Measures how many of the allowed cores have no work; a thread that waits in a loop counts as work."""

    def __init__(self) -> None:
        self._cores, self._before = len(allowed_cores()), CpuUsage.now()

    def measure(self) -> float:
        """Returns the mean number of idle cores since the last call; at least 0."""
        before, now = self._before, CpuUsage.now()
        self._before = now
        return max(0.0, self._cores - (now.all_s - before.all_s) / max(now.at - before.at, 1e-3))
