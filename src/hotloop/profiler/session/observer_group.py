"""All that watch steps more closely, as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from hotloop.profiler.base.schedule import Kind, Observer


class ObserverGroup:
    """Those of them whose kind of step is on begin in order, and end the other way round."""

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
        """A step has ended; what was seen of it is forgotten if asked to."""
        for observer in reversed(self._observers):
            if kind in observer.kinds:
                observer.drop() if drop else observer.end()

    def close(self) -> None:
        with ExitStack() as ending:  # whatever one of them fails at
            for observer in reversed(self._observers):
                ending.callback(observer.close)

    def drop_modules(self) -> None:
        """In a forked child, where the threads and locks of a profiler and a sampler are missing: ends the others alone."""
        for observer in self._observers:
            if not {"traced", "sampled"}.intersection(observer.kinds):
                observer.drop()
