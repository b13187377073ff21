"""How fast batches come, with no step waiting for them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from hotloop.data.source import Samples, Stream
from hotloop.lowering import Program
from hotloop.measuring.clocks import Clock, synchronise

_SECONDS = 0.2
_BATCHES = 200
_LEAST = 3
"""Portions, however long they take."""


def loading_workers(program: Program) -> int:
    """Worker processes that load batches before they are asked for; 0 where a batch is made when it is asked for."""
    source, asked = program.parts.roles.train, program.parts.plan.workers
    if isinstance(source, Samples):
        return source.workers if asked is None else asked
    return getattr(source.loader, "num_workers", 0) if isinstance(source, Stream) else 0


def feed_times(program: Program, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of a batch that comes onto the device with no step waiting for it, portion by portion; none with too few.

    Workers bring as many batches at a time as there are of them, so a portion is as many, else one. The program's feed is
    used up by this.
    """
    each = max(1, loading_workers(program))
    batches = _batches(program)
    if _taken(batches, each) < each:  # what starts the feed is not its pace
        return []
    synchronise(program.device)
    found: list[float] = []
    began = last = clock()
    while len(found) * each < _BATCHES and (last - began < _SECONDS or len(found) < _LEAST):
        if _taken(batches, each) < each:
            break
        synchronise(program.device)
        now = clock()
        found.append((now - last) / each)
        last = now
    return found


def feed_time(program: Program, clock: Clock = time.perf_counter) -> float | None:
    """Their mean; None with too few batches."""
    found = feed_times(program, clock)
    return statistics.fmean(found) if found else None


def _batches(program: Program) -> Iterator[Any]:
    """Those of the present epoch; what workers load also beyond its end, as they do."""
    epoch, parts = program.position.epoch, program.parts
    if not loading_workers(program):
        return program.feed.epoch(epoch)
    endless = isinstance(parts.roles.train, Samples)
    epochs = itertools.count(epoch) if endless else range(epoch, max(epoch + 1, parts.task.epochs))
    return itertools.chain.from_iterable(map(program.feed.epoch, epochs))


def _taken(batches: Iterator[Any], count: int) -> int:
    return sum(1 for _ in itertools.islice(batches, count))
