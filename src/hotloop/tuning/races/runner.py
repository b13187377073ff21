"""One Program in a race: it runs windows of steps, and is put back to how it was."""

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
    """Waits until the devices have done what they were asked for; the CPU has, whenever it is asked."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def measure_peak_memory(program: Program) -> int | None:
    """The most bytes that one training step holds at a time beyond what was there before; None where nobody says,
    and where it takes several devices.

    One step is run. On the CPU, what compiled code allocates is not seen, so a compiled step has none; nor has one in
    arrays, of which torch knows nothing.
    """
    device, plan = program.device, program.parts.plan
    if len(program.devices) > 1 or plan.engine != "eager":
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
    except NotImplementedError:  # of operations that torch shows to nobody
        return None
    return peak.bytes


_FEED_S = 0.2

_MAX_FEED_BATCHES = 200

_MIN_PORTIONS = 3
"""Portions, however long they take."""


def loading_workers(program: Program) -> int:
    """Worker processes that load batches before they are asked for; 0 where a batch is made when it is asked for."""
    source, asked = program.parts.splits.train, program.parts.plan.workers
    if isinstance(source, Samples):
        return source.workers if asked is None else asked
    return getattr(source.loader, "num_workers", 0) if isinstance(source, Stream) else 0


def measure_feed_times(program: Program, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of a batch that comes onto the device with no step waiting for it, portion by portion; none with too few.

    Workers bring as many batches at a time as there are of them, so a portion is as many, else one. The program's feed is
    used up by this.
    """
    each = max(1, loading_workers(program))
    batches = _feed_batches(program)
    if _consume_batches(batches, each) < each:  # what starts the feed is not its pace
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
    """Their mean; None with too few batches."""
    found = measure_feed_times(program, clock)
    return statistics.fmean(found) if found else None


def _feed_batches(program: Program) -> Iterator[Any]:
    """Those of the present epoch; what workers load also beyond its end, as they do."""
    epoch, parts = program.position.epoch, program.parts
    if not loading_workers(program):
        return program.feed.epoch(epoch)
    endless = isinstance(parts.splits.train, Samples)
    epochs = itertools.count(epoch) if endless else range(epoch, max(epoch + 1, parts.task.epochs))
    return itertools.chain.from_iterable(map(program.feed.epoch, epochs))


def _consume_batches(batches: Iterator[Any], count: int) -> int:
    return sum(1 for _ in itertools.islice(batches, count))


WARM_UP_S = 0.5
"""What processors and allocators take to come into their stride."""

_WARM_UP_STEPS = 3

_LONG_STEP_S = 1.0
"""Two steps that last longer warm up all that there is to warm."""


class Runner:
    """Times steps of a Program, which trains on meanwhile; where its run ends, it begins again outside of the clock.

    Attributes:
        samples, steps: what was trained on within the clock, and in how many steps.
    """

    def __init__(self, program: Program, clock: Clock = time.perf_counter) -> None:
        self.program = program
        self.samples, self.steps = 0, 0
        self._clock = clock
        self._start = program.state()
        self._begun_at = self._start.position.epoch  # the epoch of the data at which the run began last
        self._cold = True

    def warm_up(self, seconds: float = WARM_UP_S) -> tuple[float, float]:
        """Runs until the first steps' costs are over, then puts the State back: `(first step, a step)` in seconds."""
        first, _ = self._run(1)
        total, done, rate = 0.0, 1, first
        while steps := self._next_warm_up_steps(seconds - total, done, rate):
            took, _ = self._run(steps)
            total, done, rate = total + took, done + steps, took / steps
        self.restore_state()
        return first, rate

    def _next_warm_up_steps(self, left_s: float, done: int, rate: float) -> int:
        """Steps to come next, 0 at the end; of several ranks, which take each step together, as the first has it."""
        least = _WARM_UP_STEPS if rate < _LONG_STEP_S else _WARM_UP_STEPS - 1
        steps = max(1, min(done, int(left_s / max(rate, 1e-7)))) if left_s > 0 or done < least else 0
        return self.program.parts.world.broadcast_int(steps)

    def quick_estimate(self, seconds: float) -> tuple[float, float]:
        """Warms up: `(a step, copying the State out and back)` in seconds."""
        _, step_s = self.warm_up(seconds)
        began = self._clock()
        self.program.restore(self.program.state())
        return step_s, self._clock() - began

    def restore_state(self) -> None:
        """Goes to the State from before."""
        self.program.restore(self._start)
        self._begun_at, self._cold = self._start.position.epoch, True

    def run_untimed(self, steps: int) -> None:
        """Runs steps that don't count, since another plan was there before: caches, threads, clocks of the device."""
        if self.program.prime():
            steps = max(steps, 1)
        first = max(1, 2 * loading_workers(self.program))  # what workers start with is not their pace
        self._run(max(steps, first) if self._cold else steps)
        self._cold = False

    def window(self, steps: int) -> float:
        """Seconds that so many steps take, with the device waited for at both ends."""
        seconds, samples = self._run(steps)
        self.steps, self.samples = self.steps + steps, self.samples + samples
        return seconds

    def _run(self, steps: int) -> tuple[float, int]:
        """Runs so many steps: `(seconds, samples)`."""
        seconds, samples, left = 0.0, 0, steps
        while left:
            took, outcome = self._span(left)
            seconds, samples, left = seconds + took, samples + outcome.samples, left - outcome.steps
        return seconds, samples

    def _span(self, steps: int) -> tuple[float, AdvanceResult]:
        """Runs up to `steps` steps, not past the end of an epoch."""
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
        """Makes sure that there is a step to run."""
        if self.program.position.epoch - self._begun_at >= self.program.parts.task.epochs:
            self._restart()

    def _restart(self) -> None:
        """Goes to the beginning of training, at the next epoch of the data, so that its loaders go on as they are."""
        epoch = self.program.position.epoch + (1 if self.program.position.batch else 0)
        self.program.restore(replace(self._start, position=Position(epoch=epoch)))
        self._begun_at = epoch
