"""Signs of life: each rank gives one every second, and the first that is well names those which give none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from hotloop.distributed.watchdog import ended_key

_EVERY_S = 1.0
_PATIENCE_S = 4.0
"""Without a sign for so long, a rank has stopped, or its machine is in trouble."""


_OBSERVATION_S = 3 * _EVERY_S
"""Whoever is alive gives a sign meanwhile."""

_ENDED = "over"
"""The last sign of a rank that leaves."""


class Heartbeat:
    """Signs of life of one rank, and the watch over those of the others.

    Args:
        store: for this thread alone.
        launch: the name of the set of processes, so that an earlier one's signs are not taken for its own.
        tell: is told who gives no sign, and who gives one again.
    """

    def __init__(self, store: dist.Store, launch: str, rank: int, ranks: int, tell: Callable[[str], None]) -> None:
        self._store, self._launch, self._rank, self._ranks, self._tell = store, launch, rank, ranks, tell
        self._seen: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()
        self._over = threading.Event()

    @contextmanager
    def beat(self) -> Iterator[None]:
        """Gives signs in a thread of its own, until the end; the first at once, since a rank may be stopped before the next."""
        self._store.set(self._key(self._rank), "0")
        thread = threading.Thread(target=self._beat, name="hotloop-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            with suppress(RuntimeError):  # the store may be gone
                self._store.set(self._key(self._rank), _ENDED)

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone, and so is who would read it
            while not self._over.wait(_EVERY_S):
                count += 1
                self._store.set(self._key(self._rank), str(count))
                self.silent_ranks(time.monotonic())

    def silent_ranks(self, now: float) -> None:
        """Notes who has given a sign since the last look, and tells what has changed; `now` in seconds."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            beat = _read_beat(self._store, self._key(rank))
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now
        silent = {rank for rank in others if now - self._seen[rank][1] > _PATIENCE_S}
        if all(rank in silent for rank in range(self._rank)):  # those before it would have spoken
            self._compare(silent, now)
        self._silent = silent

    def _compare(self, silent: set[int], now: float) -> None:
        for rank in sorted(silent - self._silent):
            seconds = now - self._seen[rank][1]
            self._tell(f"waiting for rank {rank}: no sign of life for {seconds:.0f}s")
        for rank in sorted(self._silent - silent):
            self._tell(f"rank {rank} goes on")

    def _key(self, rank: int) -> str:
        return _beat_key(self._launch, rank)


class LaunchWatch:
    """The watch over the first rank by who has started it: the ranks have nobody else who could speak of that one.

    Args:
        store: for this thread alone.
        launch: the name of the set of processes.
        tell: is told that it gives no sign, and that it gives one again.
        kill: kills ranks that have not ended although a watchdog has ended another.
    """

    def __init__(
        self, store: dist.Store, launch: str, tell: Callable[[str], None], kill: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._key, self._tell, self._kill = store, _beat_key(launch, 0), tell, kill
        self._ended_key = ended_key(launch)
        self._beat, self._since, self._silent = "", 0.0, False
        self._over = threading.Event()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Looks each second, in a thread of its own, until the end."""
        thread = threading.Thread(target=self._watch, name="hotloop-outside", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.is_silent(time.monotonic())
            if self._store.check([self._ended_key]) and not self._over.wait(_EVERY_S):
                self._kill()

    def is_silent(self, now: float) -> None:
        """Tells what has changed since the last look; `now` in seconds. Before its first sign it may do what it likes."""
        beat = _read_beat(self._store, self._key)
        if beat != self._beat:
            self._beat, self._since = beat, now
        silent = beat not in ("", _ENDED) and now - self._since > _PATIENCE_S
        if silent and not self._silent:
            self._tell(f"waiting for rank 0: no sign of life for {now - self._since:.0f}s")
        elif self._silent and not silent:
            self._tell("rank 0 goes on")
        self._silent = silent


def silent_ranks(store: dist.Store, launch: str, ranks: int) -> list[int]:
    """The ranks that give no sign of life within some seconds from now, and haven't said that they leave."""

    def signs() -> list[str]:
        return [_read_beat(store, _beat_key(launch, rank)) for rank in range(ranks)]

    before = signs()
    time.sleep(_OBSERVATION_S)
    return [rank for rank, (then, now) in enumerate(zip(before, signs(), strict=True)) if then == now != _ENDED]


def _read_beat(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _beat_key(launch: str, rank: int) -> str:
    return f"hotloop/beat/{launch}/{rank}"
