"""Limits what a child process takes from the steps of a training beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LOSS = 0.15
"""Largest share of the training's time that the child may cost."""

_RESUME_SHARE = 0.8
"""Share of the allowed loss at which a paused child goes on."""

_SLACK_S = 0.3
"""Seconds of loss that never pause the child."""

_SPANS = 8
"""Spans without the child that give the seconds of a step anew, after a change of the machine's load."""


@dataclass
class SpareTime:
    """Pauses the child when the training's steps have lost more than their share of time, and lets it go on later.

    Attributes:
        step_s: seconds of a step without the child.
        lost_s, passed_s: seconds that the steps lost, of all seconds since the child's start.
    """

    step_s: float
    pause: Callable[[], None]
    proceed: Callable[[], None]
    lost_s: float = 0.0
    passed_s: float = 0.0
    is_paused: bool = False
    _alone: list[float] = field(default_factory=list)

    def record(self, steps: int, seconds: float) -> None:
        """Records a span of the training, and pauses the child or lets it go on."""
        if not steps:
            return
        self.passed_s += seconds
        if self.is_paused:
            self._alone.append(seconds / steps)
            if len(self._alone) >= _SPANS:
                self.step_s, self._alone = statistics.median(self._alone), []
        else:
            self.lost_s += seconds - steps * self.step_s
        self.lost_s = max(0.0, self.lost_s)
        allowed_s = MAX_LOSS * self.passed_s
        if not self.is_paused and self.lost_s > allowed_s + _SLACK_S:
            self.is_paused = True
            self.pause()
        elif self.is_paused and self.lost_s < _RESUME_SHARE * allowed_s + _SLACK_S:
            self.is_paused, self._alone = False, []
            self.proceed()
