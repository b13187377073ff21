"""Heartbeats of the ranks: each rank counts up once a second, and the first responsive rank reports silent ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch.distributed as dist

from hotloop.distributed.watchdog import ended_key

_EVERY_S = 1.0
_PATIENCE_S = 4.0
"""A rank without a heartbeat for this time is stopped, or its machine fails."""


_OBSERVATION_S = 3 * _EVERY_S
"""Each live rank sends a heartbeat within this time."""

_ENDED = "over"
"""Last heartbeat of a rank that leaves."""


class Heartbeat:
    """Sends the heartbeat of one rank, and reads those of the others.

    Args:
        store: a store that only this object's thread uses.
        launch: name of the set of processes, which keeps the heartbeats of an earlier set apart.
        tell: reports ranks that become silent, or go on.
    """

    def __init__(self, store: dist.Store, launch: str, rank: int, ranks: int, tell: Callable[[str], None]) -> None:
        self._store, self._launch, self._rank, self._ranks, self._tell = store, launch, rank, ranks, tell
        self._last_beats: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()
        self._over = threading.Event()

    @contextmanager
    def beat(self) -> Iterator[None]:
        """Sends heartbeats in a thread within the context; the first at once, since a rank may be stopped soon."""
        self._store.set(self._key(self._rank), "0")
        thread = threading.Thread(target=self._beat, name="hotloop-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            with suppress(RuntimeError):  # the store may have ended
                self._store.set(self._key(self._rank), _ENDED)

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store has ended
            while not self._over.wait(_EVERY_S):
                count += 1
                self._store.set(self._key(self._rank), str(count))
                self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Reads all heartbeats and reports changes; `now` in seconds."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            beat = _read_beat(self._store, self._key(rank))
            if rank not in self._last_beats or self._last_beats[rank][0] != beat:
                self._last_beats[rank] = beat, now
        silent = {rank for rank in others if now - self._last_beats[rank][1] > _PATIENCE_S}
        if all(rank in silent for rank in range(self._rank)):  # else an earlier rank reports
            self._report_changes(silent, now)
        self._silent = silent

    def _report_changes(self, silent: set[int], now: float) -> None:
        for rank in sorted(silent - self._silent):
            seconds = now - self._last_beats[rank][1]
            self._tell(f"waiting for rank {rank}: no sign of life for {seconds:.0f}s")
        for rank in sorted(self._silent - silent):
            self._tell(f"rank {rank} continues")

    def _key(self, rank: int) -> str:
        return _beat_key(self._launch, rank)


class LaunchWatch:
    """Watches the heartbeat of rank 0 from the launcher: no rank reports on rank 0, nor on ranks that never began.

    Args:
        store: a store that only this object's thread uses.
        launch: name of the set of processes.
        tell: reports that rank 0 becomes silent or goes on, and that a process is stopped while the ranks start.
        kill: kills ranks that still run after a watchdog has ended another rank.
    """

    def __init__(
        self, store: dist.Store, launch: str, tell: Callable[[str], None], kill: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._key, self._tell, self._kill = store, _beat_key(launch, 0), tell, kill
        self._ended_key = ended_key(launch)
        self._beat, self._since, self._silent = "", 0.0, False
        self._stopped_at: dict[int, float] = {}
        self._over = threading.Event()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Reads the heartbeat each second in a thread within the context."""
        thread = threading.Thread(target=self._watch, name="hotloop-outside", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.check(time.monotonic())
            if self._store.check([self._ended_key]) and not self._over.wait(_EVERY_S):
                self._kill()

    def check(self, now: float) -> None:
        """Reads the heartbeat and reports a change; `now` in seconds. A rank 0 that still starts isn't silent."""
        beat = _read_beat(self._store, self._key)
        if beat == "":
            self._report_stopped(now)
        if beat != self._beat:
            self._beat, self._since = beat, now
        silent = beat not in ("", _ENDED) and now - self._since > _PATIENCE_S
        if silent and not self._silent:
            self._tell(f"waiting for rank 0: no sign of life for {now - self._since:.0f}s")
        elif self._silent and not silent:
            self._tell("rank 0 continues")
        self._silent = silent

    def _report_stopped(self, now: float) -> None:
        """Reports a rank whose process is stopped, as by SIGSTOP, before the ranks have found each other."""
        stopped = {one.pid for one in psutil.Process().children() if _is_stopped(one)}
        self._stopped_at = {pid: self._stopped_at.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_at.items():
            if now - since > _PATIENCE_S:
                self._stopped_at[pid] = math.inf  # reported once
                self._tell(f"waiting for a rank that is stopped: kill -CONT {pid} lets its process continue")


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False


def silent_ranks(store: dist.Store, launch: str, ranks: int) -> list[int]:
    """Observes the heartbeats for some seconds; returns the ranks that sent none and haven't left."""

    def signs() -> list[str]:
        return [_read_beat(store, _beat_key(launch, rank)) for rank in range(ranks)]

    before = signs()
    time.sleep(_OBSERVATION_S)
    return [rank for rank, (then, now) in enumerate(zip(before, signs(), strict=True)) if then == now != _ENDED]


def _read_beat(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _beat_key(launch: str, rank: int) -> str:
    return f"hotloop/beat/{launch}/{rank}"
