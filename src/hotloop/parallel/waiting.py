"""What ranks lose to each other: time in which one waits, or sends and receives; and which rank the others wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hotloop.parallel.world import World

_WORTH_A_LINE = 0.2
"""Share of the time; ranks that wait less for each other have little to win by more even work."""


@dataclass(frozen=True)
class Spent:
    """Seconds of one rank.

    Attributes:
        waited_s: until others had come to the same place, with next to nothing to send.
        communicated_s: sending and receiving, some of it while the rank computed.
    """

    waited_s: float = 0.0
    communicated_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.waited_s + other.waited_s, self.communicated_s + other.communicated_s)


class Meter:
    """Adds up what one rank spends on the others. On a GPU, whose work is only queued, what the host sees of it."""

    def __init__(self) -> None:
        self._spent = Spent()
        self._open, self._since = 0, 0.0
        self._lock = threading.Lock()  # what was begun here may end in a thread of gloo's

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For a word to all that is too short to take time itself."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._spent += Spent(waited_s=time.perf_counter() - began)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Something is under way; what goes on at the same time counts once."""
        with self._lock:
            self._since = self._since if self._open else time.perf_counter()
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._spent += Spent(communicated_s=time.perf_counter() - self._since)

    def take(self) -> Spent:
        """What was spent since the last call."""
        with self._lock:
            spent, self._spent = self._spent, Spent()
        return spent


class Waits:
    """What the ranks of a training spend on each other; all of them ask at the same places."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._spent, self._train_s = Spent(), 0.0

    def add(self, spent: Spent, train_s: float) -> str:
        """Counts an epoch.

        Args:
            spent: by this rank.
            train_s: seconds that its steps took.

        Returns:
            A line that names the slowest rank, the one that waits least, if others waited long for it; empty elsewhere.
        """
        if self._world.alone:
            return ""
        self._spent, self._train_s = self._spent + spent, self._train_s + train_s
        waited = self._world.gathered(spent.waited_s)
        last = _least(waited)
        lost = max(waited) - waited[last]
        if not train_s or lost < _WORTH_A_LINE * train_s:
            return ""
        return f"rank {last} is the slowest: others waited {lost / train_s:.0%} of the epoch for it"

    def shares(self, spent: Spent, train_s: float) -> dict[str, Any]:
        """What all came to, with what was spent since the last `add`, which was no whole epoch.

        Returns:
            Of the time of all steps: `waiting` and `communication`, rank by rank, and the `slowest` rank. Empty of a
            process that trains alone, and where nothing was measured.
        """
        spent, train_s = self._spent + spent, self._train_s + train_s
        if self._world.alone or not train_s:
            return {}
        own = spent.waited_s / train_s, spent.communicated_s / train_s
        if not any(map(any, of_ranks := self._world.gathered(own))):
            return {}
        waiting, communication = ([round(share, 4) for share in of] for of in zip(*of_ranks, strict=True))
        return {"waiting": waiting, "communication": communication, "slowest": _least(waiting)}


def told(shares: dict[str, Any]) -> str:
    """The shares in a line."""
    ranks = [
        f"rank {rank} {waiting:.0%} and {communication:.0%}"
        for rank, (waiting, communication) in enumerate(zip(shares["waiting"], shares["communication"], strict=True))
    ]
    return f"of the steps' time in waiting and in communication: {', '.join(ranks)}; the slowest is rank {shares['slowest']}"


def _least(waited: list[float]) -> int:
    return min(range(len(waited)), key=waited.__getitem__)
