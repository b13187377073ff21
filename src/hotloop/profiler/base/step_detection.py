"""Step detection: finds which recurring event ends a training step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

_MIN_UPDATES = 3
_MIN_BACKWARDS = 5  # the first update may come after some backwards
_MAX_EVENTS = 1000


@dataclass(frozen=True)
class TrainingEvent:
    """An event that may end a step.

    Attributes:
        what: an optimizer's update, or a backward.
        where: the user's line.
        which: number of the optimizer.
    """

    what: Literal["update", "backward"]
    where: str
    which: int = 0


class Finder:
    """Chooses the event that ends a step: the most frequent event, and of equally frequent events the last.

    An optimizer's update ends a step; without an optimizer, a backward does. Optimizers that are created repeatedly are
    counted by line, once per backward: several of them may step there one after the other.
    """

    def __init__(self) -> None:
        self._counts: Counter[TrainingEvent] = Counter()
        self._at: Counter[TrainingEvent] = Counter()
        self._backwards, self._counted_at = 0, dict[TrainingEvent, int]()

    def record(self, event: TrainingEvent) -> None:
        if len(self._counts) < _MAX_EVENTS:
            self._counts[event] += 1
        self._backwards += event.what == "backward"
        place = TrainingEvent(event.what, event.where, -1)
        if not self._backwards or self._counted_at.get(place) != self._backwards:
            self._at[place] += 1
        self._counted_at[place] = self._backwards

    def anchor(self) -> TrainingEvent | None:
        """Returns the event that ends a step; None while no event is regular. A `which` of -1 matches any optimizer."""
        what = self._anchor_kind()
        least = _MIN_UPDATES if what == "update" else _MIN_BACKWARDS
        return _most_frequent(self._counts, what, least) or _most_frequent(self._at, what, least * 4)

    def guess(self) -> TrainingEvent:
        """Returns the most likely event so far; raises LookupError if no event was recorded."""
        found = _most_frequent(self._counts, self._anchor_kind(), 1)
        if found is None:
            raise LookupError("no event was recorded")
        return found

    def _anchor_kind(self) -> str:
        return "update" if any(event.what == "update" for event in self._counts) else "backward"


class Tally:
    """Counts equal events; `most` is the count of the most frequent event, so optimizers that alternate count once."""

    def __init__(self) -> None:
        self.most = 0
        self._counts: Counter[TrainingEvent] = Counter()

    def record(self, event: TrainingEvent) -> None:
        self._counts[event] += 1
        self.most = max(self.most, self._counts[event])

    def clear(self) -> None:
        if self.most:
            self.most = 0
            self._counts.clear()


def _most_frequent(events: Counter[TrainingEvent], what: str, least: int) -> TrainingEvent | None:
    counts = {event: count for event, count in events.items() if event.what == what}
    most = max(counts.values(), default=0)
    if most < least:
        return None
    return [event for event, count in counts.items() if count >= most - 1][-1]  # in order of first occurrence


def is_end(anchor: TrainingEvent, event: TrainingEvent) -> bool:
    return anchor == event or (anchor.which == -1 and (anchor.what, anchor.where) == (event.what, event.where))
