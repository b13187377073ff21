"""What ranks lose to each other: time in which one waits, or sends and receives; and which rank the others wait for."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hotloop.core.format import format_milliseconds
from hotloop.core.patches import Patches
from hotloop.core.records.profile_terms import Phase
from hotloop.distributed.world import World

_MIN_SHARE = 0.2
"""Share of the time; ranks that wait less for each other have little to win by more even work."""


@dataclass(frozen=True)
class CommTime:
    """Seconds of one rank.

    Attributes:
        waited_s: until others had come to the same place, with next to nothing to send.
        communicated_s: sending and receiving, some of it while the rank computed.
    """

    waited_s: float = 0.0
    communicated_s: float = 0.0

    def __add__(self, other: CommTime) -> CommTime:
        return CommTime(self.waited_s + other.waited_s, self.communicated_s + other.communicated_s)


class CommListener(Protocol):
    """Hears what a rank does for the others at the moment that it does."""

    def enter(self, phase: Phase) -> None:
        """It does nothing else from here on."""

    def leave(self) -> None:
        """It goes on with what it did before."""

    def turn(self, phase: Phase) -> None:
        """Nothing but this is left of what it did."""


class CommMeter:
    """Adds up what one rank spends on the others. On a GPU, whose work is only queued, what the host sees of it.

    Attributes:
        ear: who listens; None where nobody does.
    """

    def __init__(self) -> None:
        self.ear: CommListener | None = None
        self._spent = CommTime()
        self._waiting = False
        self._open, self._since = 0, 0.0
        self._lock = threading.Lock()  # what was begun here may end in a thread of gloo's

    @contextmanager
    def measure_waiting(self) -> Iterator[None]:
        """For a word to all that is too short to take time itself; what is within another wait is a part of that."""
        if self._waiting:
            yield
            return
        began, self._waiting = time.perf_counter(), True
        try:
            with self._read_events("waiting"):
                yield
        finally:
            self._waiting = False
            with self._lock:
                self._spent += CommTime(waited_s=time.perf_counter() - began)

    @contextmanager
    def measure_communication(self) -> Iterator[None]:
        self.begin()
        try:
            with self._read_events("communication"):
                yield
        finally:
            self.end()

    @contextmanager
    def measure_engines(self, *, relayed: bool) -> Iterator[None]:
        """Counts what torch's own engines wait for: nothing of fully_shard, DTensor or pipelines tells of it.

        Args:
            relayed: whether ranks wait for what others compute, as stages do.
        """
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as functional

        counted = self.measure_waiting if relayed else self._measure_sending

        def told(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wait(*args: Any, **options: Any) -> Any:
                with counted():
                    return original(*args, **options)

            return wait

        patches = Patches()
        patches.patch(dist.Work, "wait", told)
        patches.patch(functional, "wait_tensor", told)
        try:
            yield
        finally:
            patches.undo()

    @contextmanager
    def _measure_sending(self) -> Iterator[None]:
        """Communication, unless it is a word that is waited for."""
        if self._waiting:
            yield
        else:
            with self.measure_communication():
                yield

    def begin(self, *, last: bool = False) -> None:
        """Something is under way; what goes on at the same time counts once.

        Args:
            last: whether nothing is left to compute meanwhile.
        """
        with self._lock:
            self._since = self._since if self._open else time.perf_counter()
            self._open += 1
        if last and self.ear is not None:
            self.ear.turn("communication")

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._spent += CommTime(communicated_s=time.perf_counter() - self._since)

    def take(self) -> CommTime:
        """What was spent since the last call."""
        with self._lock:
            spent, self._spent = self._spent, CommTime()
        return spent

    @contextmanager
    def _read_events(self, phase: Phase) -> Iterator[None]:
        if (ear := self.ear) is None:
            yield
            return
        ear.enter(phase)
        try:
            yield
        finally:
            ear.leave()


class CommReport:
    """What the ranks of a training spend on each other; all of them ask at the same places.

    Args:
        log: adds an event to the journal.
        say: shows a line to the user.
    """

    def __init__(self, world: World, log: Callable[..., None], say: Callable[[str], None]) -> None:
        self._world, self._log, self._say = world, log, say
        self._spent, self._train_s, self._steps = CommTime(), 0.0, 0

    def add_step(self, epoch: int, spent: CommTime, train_s: float, steps: int) -> None:
        """Counts an epoch; the journal gets what a step of it cost each rank.

        A line names the slowest rank, the one that waits least, if others waited long for it.

        Args:
            epoch: from 1.
            spent: by this rank.
            train_s: seconds that its steps took.
        """
        of_ranks = self._add_counts(spent, spent, train_s, steps)
        if not of_ranks or not steps:
            return
        waited = _waiting_ms(of_ranks)
        last = _least_waiting_rank(waited)
        self._log("waiting", epoch=epoch, **per_step(of_ranks, steps), slowest=last)
        lost = max(waited) - waited[last]
        if lost >= _MIN_SHARE * train_s:
            self._say(f"rank {last} is the slowest: others waited {lost / train_s:.0%} of the epoch for it")

    def report(self, spent: CommTime, train_s: float, steps: int) -> None:
        """What all came to, with what was spent since the last epoch: to the journal, and in a line.

        Nothing of a process that trains alone, and where nothing was measured.
        """
        of_ranks = self._add_counts(self._spent + spent, spent, train_s, steps)
        if not of_ranks or not self._steps:
            return
        shares = {
            "waiting": [round(one.waited_s / self._train_s, 4) for one in of_ranks],
            "communication": [round(one.communicated_s / self._train_s, 4) for one in of_ranks],
            "slowest": _least_waiting_rank(_waiting_ms(of_ranks)),
            "step_ms": round(1e3 * self._train_s / self._steps, 3),
            **per_step(of_ranks, self._steps),
        }
        self._log("ranks", **shares)
        self._say(describe_shares(shares))

    def _add_counts(self, asked: CommTime, spent: CommTime, train_s: float, steps: int) -> list[CommTime]:
        """Adds up, and returns what each rank says when asked; nothing of one alone, or where none has spent anything."""
        if self._world.is_single:
            return []
        self._spent, self._train_s, self._steps = self._spent + spent, self._train_s + train_s, self._steps + steps
        found = self._world.all_gather(asked)
        return found if any(one != CommTime() for one in found) else []


def per_step(of_ranks: Sequence[CommTime], steps: int) -> dict[str, list[float]]:
    """Milliseconds in a step, rank by rank."""
    return {
        "waiting_ms": [round(1e3 * one.waited_s / steps, 3) for one in of_ranks],
        "communication_ms": [round(1e3 * one.communicated_s / steps, 3) for one in of_ranks],
    }


def describe_shares(shares: dict[str, Any]) -> str:
    """The shares in a line; where each piece of work comes from another rank, waiting and sending are one."""
    for column, other in (("waiting", "communication"), ("communication", "waiting")):
        if not any(shares[other]):
            each = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(shares[column]))
            return (
                f"of a step's {format_milliseconds(shares['step_ms'])} in {column}, with {other} in it: {each};"
                f" the slowest is rank {shares['slowest']}"
            )
    ranks = [
        f"rank {rank} {waiting:.0%} and {communication:.0%}"
        for rank, (waiting, communication) in enumerate(zip(shares["waiting"], shares["communication"], strict=True))
    ]
    return (
        f"of a step's {format_milliseconds(shares['step_ms'])} in waiting and in communication: {', '.join(ranks)};"
        f" the slowest is rank {shares['slowest']}"
    )


def _waiting_ms(of_ranks: Sequence[CommTime]) -> list[float]:
    """What tells by how much a rank was ahead: who sends to a slower one waits there, too."""
    return [one.waited_s + one.communicated_s for one in of_ranks]


def _least_waiting_rank(waited: list[float]) -> int:
    return min(range(len(waited)), key=waited.__getitem__)
