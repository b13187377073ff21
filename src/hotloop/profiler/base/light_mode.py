"""Light mode: skipped warm-up steps and the clean step after them, of which only the boundaries are marked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median
from threading import get_ident
from types import CodeType
from typing import Any

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import StepClock
from hotloop.profiler.base.schedule import DISTURBING
from hotloop.profiler.base.step_facts import StepFact

_WARM_UP_MS = 20.0
_MAX_WARM_UP_STEPS = 64
"""Duration and number of steps after which Python's caches are warm; 20 ms change a longer step by less than 1 %."""

_MAX_EARLY_STEPS, _ENOUGH_MEASURED = 4, 24
"""Limit of skipped steps until enough steps are measured: a script may have few steps; see `without_cold_steps`."""

_OWN_FRAMES = 2
"""Profiler frames between `sys._getframe` and the optimizer: `ends_light_step` and torch's hook."""


class LightSpan:
    """A run of steps whose boundaries are found by comparing the frame that calls the optimizer.

    Full handling of a step boundary takes a sixth of a very short step, and cools the caches.

    Attributes:
        on: whether the current step is light: only updates that end the step in another way are recorded.
        left: number of steps to skip before the clean step.
        passed: number of skipped steps that are not yet counted by the step sequence.
        began: clock mark at which the current step began, if a skipped step ended there.
        ended: clock mark at which the clean step ended.
    """

    def __init__(self) -> None:
        self.on = False
        self.left = self.passed = 0
        self.began: Any = None
        self.ended: Any = None
        self._clock: StepClock
        self._last: Callable[[], None]
        self._thread = self._optimizer = self._depth = self._instruction = 0
        self._code: CodeType | None = None

    def begin(self, optimizer: Any, sites: CallSites, clock: StepClock, last: Callable[[], None]) -> bool:
        """Starts at an update that ends a step; False if no user line calls. `last` runs before the clean step."""
        frame, between = sites.caller_frame()
        if frame is None:
            return False
        self._thread, self._optimizer, self._depth = get_ident(), id(optimizer), _OWN_FRAMES + between
        self._code, self._instruction = frame.f_code, frame.f_lasti
        self._clock, self._last, self.ended = clock, last, None
        self.on = True
        return True

    def stop(self) -> bool:
        was, self.on, self.ended = self.on, False, None
        return was

    def ends_light_step(self, optimizer: Any) -> bool:
        """Returns whether a finished update ends a skipped step, which needs no further recording."""
        if not self.on or id(optimizer) != self._optimizer or get_ident() != self._thread:
            return False
        if not self.left:
            self.ended = self._clock.mark(idle=False)  # the rest of this call is profiler overhead
        try:
            frame = sys._getframe(self._depth)
        except ValueError:  # called from a shallower stack
            return False
        if not self.left or frame.f_lasti != self._instruction or frame.f_code is not self._code:
            return False
        self.left -= 1
        self.passed += 1
        if not self.left:
            self._last()
        self.began = self._clock.mark(idle=False)
        return True


def steps_until_warm(steps: Sequence[StepFact]) -> int:
    """Returns the number of steps to skip until Python's caches are warm after a disturbing step; 0 for long steps."""
    ms = next((step.ms for step in reversed(steps) if step.kind not in DISTURBING), 0.0)
    enough = sum(step.kind in ("clean", "instrumented") for step in steps) >= _ENOUGH_MEASURED
    needed = min(_MAX_WARM_UP_STEPS if enough else _MAX_EARLY_STEPS, int(_WARM_UP_MS / ms)) if ms else 0
    since = next((n for n, step in enumerate(reversed(steps)) if step.kind in DISTURBING), needed)
    return max(0, needed - since)


def without_cold_steps(measured: Sequence[StepFact]) -> Sequence[StepFact]:
    """Drops the first measured steps if steps are short (cold caches) and enough later steps exist."""
    later = measured[_ENOUGH_MEASURED:]
    if len(later) < _ENOUGH_MEASURED or median(step.ms for step in later) * _MAX_EARLY_STEPS > _WARM_UP_MS:
        return measured
    return later
