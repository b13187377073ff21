"""A stretch of steps that are spared: those that go by until Python's caches are warm again, and the clean one after them."""

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
"""So long, and so many steps at most, until they are as warm as before; a longer step is no hundredth longer for it."""

_MAX_EARLY_STEPS, _ENOUGH_MEASURED = 4, 24
"""So many at most until enough are measured, in case that the script has no more steps to spare; see `without_cold_steps`."""

_OWN_FRAMES = 2
"""Frames of the watch's own where `passes` is asked: itself, and the hook."""


class LightSpan:
    """Goes from step to step by a clock's mark alone, as long as each ends as the one before it did.

    All that ending a step and beginning the next takes otherwise is a sixth of a very short step, and leaves caches cold.

    Attributes:
        on: whether the step that is on is spared: of updates none is heard but those that end it in another way.
        left: steps to go by before the one that counts.
        passed: steps that went by since somebody else counted them.
        began: the mark at which the step that is on began, if one that went by so ended.
        ended: the mark at which the one that counts ended.
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
        """An optimizer's update has ended a step, and so it will the next ones; False if no line of the user's called it.

        Args:
            last: is called before the step that counts begins.
        """
        frame, between = sites.caller_frame()
        if frame is None:
            return False
        self._thread, self._optimizer, self._depth = get_ident(), id(optimizer), _OWN_FRAMES + between
        self._code, self._instruction = frame.f_code, frame.f_lasti
        self._clock, self._last, self.ended = clock, last, None
        self.on = True
        return True

    def stop(self) -> bool:
        """The step that is on is spared no more; whether it was."""
        was, self.on, self.ended = self.on, False, None
        return was

    def ends_light_step(self, optimizer: Any) -> bool:
        """Whether an update that is done has ended a step that goes by, and needn't be heard; torch's hook asks."""
        if not self.on or id(optimizer) != self._optimizer or get_ident() != self._thread:
            return False
        if not self.left:
            self.ended = self._clock.mark(idle=False)  # all the rest is the watch's own
        try:
            frame = sys._getframe(self._depth)
        except ValueError:  # it is called from further out
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
    """How many steps find Python's caches cold, by what was replaced for one before; 0 if they're too long to tell."""
    ms = next((step.ms for step in reversed(steps) if step.kind not in DISTURBING), 0.0)
    enough = sum(step.kind in ("clean", "instrumented") for step in steps) >= _ENOUGH_MEASURED
    settling = min(_MAX_WARM_UP_STEPS if enough else _MAX_EARLY_STEPS, int(_WARM_UP_MS / ms)) if ms else 0
    since = next((n for n, step in enumerate(reversed(steps)) if step.kind in DISTURBING), settling)
    return max(0, settling - since)


def without_cold_steps(measured: Sequence[StepFact]) -> Sequence[StepFact]:
    """The measured steps without the first ones, where short steps came too soon after others for warm caches.

    All of them where they're long, or too few came later.
    """
    later = measured[_ENOUGH_MEASURED:]
    if len(later) < _ENOUGH_MEASURED or median(step.ms for step in later) * _MAX_EARLY_STEPS > _WARM_UP_MS:
        return measured
    return later
