"""A group of observers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from hotloop.profiler.base.schedule import Kind, Observer


class ObserverGroup:
    """Observers of the current step's kind begin in order, and end in reverse order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)

    def begin(self, kind: Kind) -> None:
        for observer in self._observers:
            if kind in observer.kinds:
                observer.begin()

    def end(self, kind: Kind, *, drop: bool) -> None:
        for observer in reversed(self._observers):
            if kind in observer.kinds:
                observer.drop() if drop else observer.end()

    def close(self) -> None:
        with ExitStack() as ending:  # all are closed, even if one raises
            for observer in reversed(self._observers):
                ending.callback(observer.close)

    def drop_modules(self) -> None:
        """In a forked child: ends all but the profiler and the sampler, whose threads and locks are missing."""
        for observer in self._observers:
            if not {"traced", "sampled"}.intersection(observer.kinds):
                observer.drop()
