"""The times of a script's steps, found from the updates of its optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from hotloop.profiler.base.step_detection import Finder, TrainingEvent, is_end

_LOST_UPDATES = 100
"""Updates of other optimizers after which the step's end is searched anew."""


class StepTimes:
    """Finds the optimizer whose update ends a step.

    Attributes:
        steps: number of steps so far.

    Args:
        lost: is called when another optimizer has taken over.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self.steps = 0
        self._lost = lost
        self._finder, self._numbers = Finder(), WeakKeyDictionary[Any, int]()
        self._anchor: TrainingEvent | None = None
        self._others = self._updates = 0
        self._last_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether the update that ends a step is known."""
        return self._anchor is not None

    def rested(self, updates: int) -> None:
        """Counts the steps of updates that were not reported; the length of the step that ends next is unknown."""
        self.steps += round(updates * self.steps / self._updates) if self._updates else 0
        self._updates += updates
        self._last_s = None

    def search(self) -> None:
        """Searches the update that ends a step anew."""
        self._anchor, self._finder, self._last_s, self._others = None, Finder(), None, 0

    def update_ended(self, optimizer: Any) -> float | None:
        """Returns the seconds of the step that ends with this update; None within a step, and for the first step."""
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        event = TrainingEvent("update", "", number)
        if self._anchor is None:
            self._finder.record(event)
            self._anchor = self._finder.anchor()
            return None
        self._updates += 1
        if not is_end(self._anchor, event):
            self._others += 1
            if self._others > _LOST_UPDATES:
                self.search()
                self._lost()
            return None
        self._others = 0
        self.steps += 1
        now = time.perf_counter()
        last_s, self._last_s = self._last_s, now
        return None if last_s is None else now - last_s
