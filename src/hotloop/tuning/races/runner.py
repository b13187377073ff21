"""Runs windows of one Program's steps in a race, and restores its State."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hotloop.core.state import Position
from hotloop.data.sources import Samples, Stream
from hotloop.lowering.failures.out_of_memory import PeakMemory, live_tensors
from hotloop.lowering.program import AdvanceResult, Program

Clock = Callable[[], float]


def synchronize_devices(*devices: torch.device) -> None:
    """Waits until the devices have finished their work."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def measure_peak_memory(program: Program) -> int | None:
    """Runs a step and returns its peak memory in bytes beyond the memory before; None if torch can't measure that.

    That is so with several devices, and for compiled steps on a CPU.
    """
    device, plan = program.device, program.parts.plan
    if len(program.devices) > 1:
        return None
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        synchronize_devices(device)
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        program.advance(1)
        synchronize_devices(device)
        return int(module.max_memory_allocated(device) - before)
    if device.type != "cpu" or plan.compile != "none":
        return None
    try:
        with PeakMemory(live_tensors(program, ())) as peak:
            program.advance(1)
    except NotImplementedError:  # torch.cond, for example
        return None
    return peak.bytes


_FEED_S = 0.2

_MAX_FEED_BATCHES = 200

_MIN_PORTIONS = 3
"""Least number of portions to time."""


def loading_workers(program: Program) -> int:
    """Returns the number of worker processes that load batches ahead."""
    source, asked = program.parts.splits.train, program.parts.plan.workers
    if isinstance(source, Samples):
        return source.workers if asked is None else asked
    return getattr(source.loader, "num_workers", 0) if isinstance(source, Stream) else 0


def measure_feed_times(program: Program, clock: Clock = time.perf_counter) -> list[float]:
    """Returns seconds of a batch's way to the device without steps, portion by portion; empty with too few batches.

    A portion has a batch for each worker, since workers deliver at the same time. The epoch's batches are consumed.
    """
    each = max(1, loading_workers(program))
    batches = _feed_batches(program)
    if _consume_batches(batches, each) < each:  # the startup of the feed is left out
        return []
    synchronize_devices(program.device)
    found: list[float] = []
    began = last = clock()
    while len(found) * each < _MAX_FEED_BATCHES and (last - began < _FEED_S or len(found) < _MIN_PORTIONS):
        if _consume_batches(batches, each) < each:
            break
        synchronize_devices(program.device)
        now = clock()
        found.append((now - last) / each)
        last = now
    return found


def mean_feed_time(program: Program, clock: Clock = time.perf_counter) -> float | None:
    """Returns the mean of `measure_feed_times`; None with too few batches."""
    found = measure_feed_times(program, clock)
    return statistics.fmean(found) if found else None


def _feed_batches(program: Program) -> Iterator[Any]:
    """Yields the batches of the current epoch; with workers, also of the next epochs, which they load ahead."""
    epoch, parts = program.position.epoch, program.parts
    if not loading_workers(program):
        return program.feed.epoch(epoch)
    endless = isinstance(parts.splits.train, Samples)
    epochs = itertools.count(epoch) if endless else range(epoch, max(epoch + 1, parts.task.epochs))
    return itertools.chain.from_iterable(map(program.feed.epoch, epochs))


def _consume_batches(batches: Iterator[Any], count: int) -> int:
    return sum(1 for _ in itertools.islice(batches, count))


WARM_UP_S = 0.5
"""Seconds until clocks of processors and allocators are steady."""

_WARM_UP_STEPS = 3

_LONG_STEP_S = 1.0
"""Seconds of a step from which two steps are enough warm-up."""


class Runner:
    """Times steps of a Program; at the end of its run the Program restarts, untimed.

    Attributes:
        samples, steps: timed samples and steps.
    """

    def __init__(self, program: Program, clock: Clock = time.perf_counter) -> None:
        self.program = program
        self.samples, self.steps = 0, 0
        self._clock = clock
        self._start = program.state()
        self._begun_at = self._start.position.epoch  # the epoch of the data at which the run began last
        self._cold = True

    def warm_up(self, seconds: float = WARM_UP_S) -> tuple[float, float]:
        """Warms up, restores the State, and returns the seconds of the first step and of a later step."""
        first, _ = self._run(1)
        total, done, rate = 0.0, 1, first
        while steps := self._next_warm_up_steps(seconds - total, done, rate):
            took, _ = self._run(steps)
            total, done, rate = total + took, done + steps, took / steps
        self.restore_state()
        return first, rate

    def _next_warm_up_steps(self, left_s: float, done: int, rate: float) -> int:
        """Returns the number of the next steps, 0 at the end; all ranks take the first rank's number."""
        least = _WARM_UP_STEPS if rate < _LONG_STEP_S else _WARM_UP_STEPS - 1
        steps = max(1, min(done, int(left_s / max(rate, 1e-7)))) if left_s > 0 or done < least else 0
        return self.program.parts.world.broadcast_int(steps)

    def quick_estimate(self, seconds: float) -> tuple[float, float]:
        """Warms up, and returns the seconds of a step and of copying the State out and back."""
        _, step_s = self.warm_up(seconds)
        began = self._clock()
        self.program.restore(self.program.state())
        return step_s, self._clock() - began

    def restore_state(self) -> None:
        self.program.restore(self._start)
        self._begun_at, self._cold = self._start.position.epoch, True

    def run_untimed(self, steps: int) -> None:
        """Runs untimed steps after another plan: caches, threads and clocks adapt."""
        if self.program.prime():
            steps = max(steps, 1)
        first = max(1, 2 * loading_workers(self.program))  # workers start with batches loaded ahead
        self._run(max(steps, first) if self._cold else steps)
        self._cold = False

    def window(self, steps: int) -> float:
        """Returns the seconds of `steps` steps, with a synchronization at both ends."""
        seconds, samples = self._run(steps)
        self.steps, self.samples = self.steps + steps, self.samples + samples
        return seconds

    def _run(self, steps: int) -> tuple[float, int]:
        """Runs steps, and returns seconds and samples."""
        seconds, samples, left = 0.0, 0, steps
        while left:
            took, outcome = self._span(left)
            seconds, samples, left = seconds + took, samples + outcome.samples, left - outcome.steps
        return seconds, samples

    def _span(self, steps: int) -> tuple[float, AdvanceResult]:
        """Runs up to `steps` steps within one epoch."""
        program = self.program
        self.ensure_step()
        synchronize_devices(*program.devices)
        began = self._clock()
        outcome = program.advance(steps)
        if outcome.ended:
            program.end_epoch(1.0)
        synchronize_devices(*program.devices)
        return self._clock() - began, outcome

    def ensure_step(self) -> None:
        """Restarts the Program if its run has ended."""
        if self.program.position.epoch - self._begun_at >= self.program.parts.task.epochs:
            self._restart()

    def _restart(self) -> None:
        """Starts training again at the next epoch of the data, so that loaders continue."""
        epoch = self.program.position.epoch + (1 if self.program.position.batch else 0)
        self.program.restore(replace(self._start, position=Position(epoch=epoch)))
        self._begun_at = epoch
