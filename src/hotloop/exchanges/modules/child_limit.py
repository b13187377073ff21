"""Limits the time that the script's steps lose to a fork that compiles or proves at the same time."""

from __future__ import annotations

import statistics
from collections import deque

from hotloop.core.processes.compile_process import CompileProcess
from hotloop.tuning.spare_time import SpareTime

_MOST_LOSS = 0.02
"""Largest share of the script's time that forks may cost. The length of the run is unknown, so a larger cost might not be
saved later."""

_SPAN_S, _RECENT_SPANS = 0.1, 20
"""Seconds of a span of steps, and the last spans without a fork that give the seconds of a step."""

_OTHER_WORK = 4.0
"""A step that is so many times as long as usual has an evaluation or a checkpoint in it, and doesn't count."""


class ChildLimit:
    """Pauses a fork while the steps at the same time are too slow; a fork on an idle core is never paused for long."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_SPANS)
        self._process: CompileProcess | None = None
        self._spare_time: SpareTime | None = None
        self._steps, self._seconds = 0, 0.0

    def step_ended(self, process: CompileProcess | None, seconds: float | None, steps: int = 1) -> None:
        """Records some steps.

        Args:
            process: the fork that runs now, or None.
            seconds: of the steps; None if unknown.
            steps: their number.
        """
        if process is not self._process:
            self._process, self._spare_time, self._steps, self._seconds = process, None, 0, 0.0
            if process is not None and self._recent:
                usual_s = statistics.median(self._recent)
                self._spare_time = SpareTime(usual_s, process.pause, process.proceed, most_loss=_MOST_LOSS)
        if seconds is None or (self._recent and seconds > _OTHER_WORK * steps * statistics.median(self._recent)):
            return
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if self._seconds < _SPAN_S:
            return
        if self._spare_time is not None:
            self._spare_time.record(self._steps, self._seconds)
        elif process is None:
            self._recent.append(self._seconds / self._steps)
        self._steps, self._seconds = 0, 0.0
