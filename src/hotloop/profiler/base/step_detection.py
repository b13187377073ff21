"""Finds which of the things that happen again and again ends a training step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

_MIN_UPDATES = 3
_MIN_BACKWARDS = 5  # the first update may come after some backwards
_MAX_EVENTS = 1000


@dataclass(frozen=True)
class TrainingEvent:
    """Something that may end a step.

    Attributes:
        what: an update of an optimizer's, or a backward.
        where: the user's line.
        which: number of the optimizer.
    """

    what: Literal["update", "backward"]
    where: str
    which: int = 0


class Finder:
    """Sees events, and says which of them ends a step: the most frequent, and of equals the last.

    An optimizer's update ends a step; a backward does where no optimizer is used. Optimizers that are made anew again
    and again count by their line, once for each backward: many of them may step there one after the other.
    """

    def __init__(self) -> None:
        self._seen: Counter[TrainingEvent] = Counter()
        self._at: Counter[TrainingEvent] = Counter()
        self._backwards, self._counted_at = 0, dict[TrainingEvent, int]()

    def record(self, event: TrainingEvent) -> None:
        if len(self._seen) < _MAX_EVENTS:
            self._seen[event] += 1
        self._backwards += event.what == "backward"
        place = TrainingEvent(event.what, event.where, -1)
        if not self._backwards or self._counted_at.get(place) != self._backwards:
            self._at[place] += 1
        self._counted_at[place] = self._backwards

    def anchor(self) -> TrainingEvent | None:
        """The event that ends a step; None as long as nothing is regular. A `which` of -1 stands for any."""
        what = self._anchor_kind()
        least = _MIN_UPDATES if what == "update" else _MIN_BACKWARDS
        return _most_frequent(self._seen, what, least) or _most_frequent(self._at, what, least * 4)

    def guess(self) -> TrainingEvent:
        """The event that ends a step, as far as so few can say.

        Raises:
            LookupError: nothing was seen.
        """
        found = _most_frequent(self._seen, self._anchor_kind(), 1)
        if found is None:
            raise LookupError("no event was seen")
        return found

    def _anchor_kind(self) -> str:
        return "update" if any(event.what == "update" for event in self._seen) else "backward"


class Tally:
    """How often events come; many optimizers that step once each in a step tell no more of a loop than one.

    Attributes:
        most: times that the most frequent of them was seen.
    """

    def __init__(self) -> None:
        self.most = 0
        self._seen: Counter[TrainingEvent] = Counter()

    def record(self, event: TrainingEvent) -> None:
        self._seen[event] += 1
        self.most = max(self.most, self._seen[event])

    def clear(self) -> None:
        if self.most:
            self.most = 0
            self._seen.clear()


def _most_frequent(seen: Counter[TrainingEvent], what: str, least: int) -> TrainingEvent | None:
    counts = {event: count for event, count in seen.items() if event.what == what}
    most = max(counts.values(), default=0)
    if most < least:
        return None
    return [event for event, count in counts.items() if count >= most - 1][-1]  # in the order of their first time


def is_end(anchor: TrainingEvent, event: TrainingEvent) -> bool:
    """Whether the event is the anchor."""
    return anchor == event or (anchor.which == -1 and (anchor.what, anchor.where) == (event.what, event.where))
