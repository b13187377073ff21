"""The times and kinds of a script's steps, found from the updates of its optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from hotloop.exchanges.windows.paired_times import Seconds, read_clocks
from hotloop.profiler.base.steps import Finder, TrainingEvent, is_end

_LOST_UPDATES = 100
"""Updates of other optimizers after which the step's end is searched anew."""


class TimedStep(NamedTuple):
    """One step of the script.

    Attributes:
        seconds: that it took.
        kind: what it consists of: the numbers of updates of other optimizers, then the number of recorded operations, which a
            compiled module lowers. Steps of another kind take another time.
    """

    seconds: Seconds
    kind: tuple[Hashable, ...] = ()


_NO_OTHERS = frozenset[tuple[int, int]]()


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
        self._anchored: ref[Any] | None = None
        self._others = Counter[int]()
        self._updates = 0
        self._last: tuple[Seconds, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether the update that ends a step is known."""
        return self._anchor is not None

    def rested(self, updates: int) -> None:
        """Counts the steps of updates that were not reported; the length of the step that ends next is unknown."""
        self.steps += round(updates * self.steps / self._updates) if self._updates else 0
        self._updates += updates
        self._last, self._others = None, Counter()

    def search(self) -> None:
        """Searches the update that ends a step anew."""
        self._anchor, self._finder, self._last, self._others = None, Finder(), None, Counter()
        self._anchored = None

    def update_ended(self, optimizer: Any, *, reads_cpu: bool = True) -> TimedStep | None:
        """Returns the step that ends with this update; None within a step, and for the first step."""
        if (
            self._anchored is None or self._anchored() is not optimizer
        ):  # else the usual end of a step, in a third of the time
            number = self._numbers.setdefault(optimizer, len(self._numbers))
            event = TrainingEvent("update", "", number)
            if self._anchor is None:
                self._finder.record(event)
                self._anchor = self._finder.anchor()
                return None
            if not is_end(self._anchor, event):
                self._updates += 1
                self._others[number] += 1
                if self._others.total() > _LOST_UPDATES:
                    self.search()
                    self._lost()
                return None
            self._anchored = ref(optimizer)
        self._updates += 1
        others = _NO_OTHERS
        if self._others:
            others, self._others = frozenset(self._others.items()), Counter()
        self.steps += 1
        last, self._last = self._last, (read_clocks(reads_cpu=reads_cpu), torch.autograd._get_sequence_nr())
        if last is None:
            return None
        return TimedStep(self._last[0].since(last[0]), (others, self._last[1] - last[1]))
