"""Measures how long ranks wait for each other and how long they send and receive; finds the slowest rank."""

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
"""Share of the training time; shorter waits for the slowest rank aren't reported."""


@dataclass(frozen=True)
class CommTime:
    """Seconds of one rank.

    Attributes:
        waited_s: waiting for other ranks, with little to send.
        communicated_s: sending and receiving, in part while the rank computes.
    """

    waited_s: float = 0.0
    communicated_s: float = 0.0

    def __add__(self, other: CommTime) -> CommTime:
        return CommTime(self.waited_s + other.waited_s, self.communicated_s + other.communicated_s)


class CommListener(Protocol):
    """Receives the begins and ends of a rank's waiting and communication as they happen."""

    def enter(self, phase: Phase) -> None:
        """The rank only waits or communicates from now on."""

    def leave(self) -> None:
        """The rank continues with the phase before."""

    def turn(self, phase: Phase) -> None:
        """The current phase ends; only `phase` is left to do."""


class CommMeter:
    """Adds up one rank's time of waiting and communication, on a GPU as the host measures them.

    Attributes:
        ear: the listener, or None.
    """

    def __init__(self) -> None:
        self.ear: CommListener | None = None
        self._spent = CommTime()
        self._waiting = False
        self._open, self._since = 0, 0.0
        self._lock = threading.Lock()  # a transfer may end in a thread of gloo

    @contextmanager
    def measure_waiting(self) -> Iterator[None]:
        """Measures a message too short to take time itself; nested calls count once."""
        if self._waiting:
            yield
            return
        began, self._waiting = time.perf_counter(), True
        try:
            with self._report_phase("waiting"):
                yield
        finally:
            self._waiting = False
            with self._lock:
                self._spent += CommTime(waited_s=time.perf_counter() - began)

    @contextmanager
    def measure_communication(self) -> Iterator[None]:
        self.begin()
        try:
            with self._report_phase("communication"):
                yield
        finally:
            self.end()

    @contextmanager
    def measure_engines(self, *, relayed: bool) -> Iterator[None]:
        """Measures the waits of torch's own engines: fully_shard, DTensor and pipelines have no hooks for this.

        Args:
            relayed: whether ranks wait for results of other ranks, as pipeline stages do.
        """
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as functional

        measure = self.measure_waiting if relayed else self._measure_sending

        def measured(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wait(*args: Any, **options: Any) -> Any:
                with measure():
                    return original(*args, **options)

            return wait

        patches = Patches()
        patches.patch(dist.Work, "wait", measured)
        patches.patch(functional, "wait_tensor", measured)
        try:
            yield
        finally:
            patches.undo()

    @contextmanager
    def _measure_sending(self) -> Iterator[None]:
        if self._waiting:
            yield
        else:
            with self.measure_communication():
                yield

    def begin(self, *, last: bool = False) -> None:
        """Records the begin of a transfer; simultaneous transfers count once.

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
        """Returns the time since the last call."""
        with self._lock:
            spent, self._spent = self._spent, CommTime()
        return spent

    @contextmanager
    def _report_phase(self, phase: Phase) -> Iterator[None]:
        if (ear := self.ear) is None:
            yield
            return
        ear.enter(phase)
        try:
            yield
        finally:
            ear.leave()


class CommReport:
    """Reports the waiting and communication of a training's ranks; all ranks call its methods at the same places.

    Args:
        log: adds an event to the journal.
        say: shows a line to the user.
    """

    def __init__(self, world: World, log: Callable[..., None], say: Callable[[str], None]) -> None:
        self._world, self._log, self._say = world, log, say
        self._spent, self._train_s, self._steps = CommTime(), 0.0, 0

    def add_epoch(self, epoch: int, spent: CommTime, train_s: float, steps: int) -> None:
        """Adds an epoch; the journal gets each rank's time in a step.

        A line names the slowest rank, which waits least, if other ranks waited long for that rank.

        Args:
            epoch: number of the epoch, from 1.
            spent: this rank's time in the epoch.
            train_s: duration of the epoch's steps in seconds.
            steps: number of steps in the epoch.
        """
        of_ranks = self._add_times(spent, spent, train_s, steps)
        if not of_ranks or not steps:
            return
        waited = _waiting_ms(of_ranks)
        last = _least_waiting_rank(waited)
        self._log("waiting", epoch=epoch, **per_step(of_ranks, steps), slowest=last)
        lost = max(waited) - waited[last]
        if lost >= _MIN_SHARE * train_s:
            self._say(f"rank {last} is the slowest: others waited {lost / train_s:.0%} of the epoch for it")

    def report(self, spent: CommTime, train_s: float, steps: int) -> None:
        """Writes the whole training's times, with those since the last epoch, to the journal and a line.

        A single process, or one without measured times, writes nothing.
        """
        of_ranks = self._add_times(self._spent + spent, spent, train_s, steps)
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

    def _add_times(self, asked: CommTime, spent: CommTime, train_s: float, steps: int) -> list[CommTime]:
        """Adds the times; returns `asked` of each rank, or nothing for a single rank or without measured times."""
        if self._world.is_single:
            return []
        self._spent, self._train_s, self._steps = self._spent + spent, self._train_s + train_s, self._steps + steps
        of_ranks = self._world.all_gather(asked)
        return of_ranks if any(spent != CommTime() for spent in of_ranks) else []


def per_step(of_ranks: Sequence[CommTime], steps: int) -> dict[str, list[float]]:
    """Returns the milliseconds in a step, by rank."""
    return {
        "waiting_ms": [round(1e3 * one.waited_s / steps, 3) for one in of_ranks],
        "communication_ms": [round(1e3 * one.communicated_s / steps, 3) for one in of_ranks],
    }


def describe_shares(shares: dict[str, Any]) -> str:
    """Returns the line about the shares; where a rank only waits or only sends, both count as the same."""
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
    """A rank that is ahead waits while sending, too: both times together show the lead."""
    return [one.waited_s + one.communicated_s for one in of_ranks]


def _least_waiting_rank(waited: list[float]) -> int:
    return min(range(len(waited)), key=waited.__getitem__)
