"""A timeline of one step in which each instant belongs to exactly one phase.

The phases lie on a stack: what is inside a forward is of the forward, unless it is something of its own such as a copy.
While a loader makes samples, whatever makes them is of the data: transforms may be modules, and may copy and read numbers.
Where nothing is on the stack, the ground says what the loop is doing between the things that can be seen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hotloop.core.records.profile_terms import Phase

if sys.platform == "linux":
    import resource

_MAX_MARKS = 20_000
"""In one step; what comes then belongs to the phase it is in, so that memory stays bounded."""


_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Of Linux: nanoseconds that this thread ran, that it stood ready while others had the cores, and how often it ran."""

RANK_PHASES: tuple[Phase, ...] = ("waiting", "communication")

_DEDUCED_PHASES: tuple[Phase, ...] = ("python", "batch", "loss")
"""Phases that a step is in where nothing else is seen."""


class StepClock(Protocol):
    """Marks instants, and says later how far apart they were."""

    def mark(self, *, idle: bool = True) -> Any:
        """
        Args:
            idle: whether `idle_ms` will be asked from it.
        """

    def ms(self, first: Any, last: Any) -> float: ...
    def idle_ms(self, first: Any, last: Any) -> float:
        """Of this time, how long the thread that marked didn't run, as far as that is known."""

    def has_passed(self, mark: Any) -> bool:
        """Whether that instant has come, so that `ms` can be asked."""


class Instant(NamedTuple):
    """Of a thread: the time, its own CPU time, how often it gave up its core to wait, and how long others kept it from one."""

    wall_s: float
    cpu_s: float
    waits: int
    queued_s: float = 0.0


class HostClock:
    """The process's own time, and that in which one thread ran."""

    def __init__(self) -> None:
        self._switches, self._queued_s = -1, 0.0

    def mark(self, *, idle: bool = True) -> Instant:
        if not idle:  # in steps of which the length alone is wanted, the rest would be a part of it
            return Instant(time.perf_counter(), 0.0, 0)
        if sys.platform != "linux":  # where nobody counts waits
            return Instant(time.perf_counter(), time.thread_time(), 0)
        now, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
        switches = used.ru_nvcsw + used.ru_nivcsw
        if switches != self._switches:  # only then it can have queued, and to ask takes longer than all the rest
            self._switches, self._queued_s = switches, _queued_s()
        return Instant(now, used.ru_utime + used.ru_stime, used.ru_nvcsw, self._queued_s)

    def ms(self, first: Instant, last: Instant) -> float:
        return (last.wall_s - first.wall_s) * 1e3

    def idle_ms(self, first: Instant, last: Instant) -> float:
        """A thread that others kept from its core doesn't wait for anything."""
        ran_s = last.cpu_s - first.cpu_s + last.queued_s - first.queued_s
        return max(0.0, self.ms(first, last) - ran_s * 1e3) if last.waits > first.waits else 0.0

    def has_passed(self, mark: Instant) -> bool:
        return True


def _queued_s() -> float:
    """Seconds in which this thread could have run; 0 where the system doesn't say."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class DeviceClock:
    """When the device comes to each mark in its queue of work; it never waits for the device.

    Where the device is behind, the time between two marks is that of the work between them; where it waits for the host,
    it's the host's time. Either way the phases add up to what passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, *, idle: bool = True) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def ms(self, first: torch.Event, last: torch.Event) -> float:
        return first.elapsed_time(last)

    def idle_ms(self, first: torch.Event, last: torch.Event) -> float:
        return 0.0

    def has_passed(self, mark: torch.Event) -> bool:
        return mark.query()


def clock_for(device: torch.device) -> StepClock:
    """The clock of steps that compute on a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Timeline:
    """The phases of one step at a time; costs nothing while no step is on.

    Attributes:
        on: whether a step is being watched.
        device: whose clock it goes by.
        amended: is told of marks whose phase turned out to be another one, and which.
    """

    def __init__(self, clock: StepClock) -> None:
        self.clock, self.device = clock, "cpu"
        self.amended: Callable[[Collection[int], Phase], object] = lambda marks, phase: None
        self.on = False
        self._stack: list[Phase] = ["python"]
        self._loading = 0
        self._marks: list[tuple[Any, Phase]] = []
        self._grounds: list[int] = []

    @property
    def current(self) -> Phase:
        """What the step is doing now; may be asked from other threads."""
        return self._stack[-1] if self.on else "unattributed"

    @property
    def last_mark(self) -> int:
        """The number of the mark since which it does so."""
        return len(self._marks) - 1

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def loading(self) -> bool:
        """Whether a loader makes samples, and nothing among ranks meanwhile."""
        return self.on and self._loading > 0 and self._stack[-1] == "data"

    def begin(self, ground: Phase) -> None:
        """Begins a step."""
        self._stack, self._marks, self._grounds, self.on = [ground], [], [], True
        self._loading = 0
        self._mark(ground)

    def use_clock_of(self, outputs: Any) -> str:
        """Goes by the clock of the device that outputs are on from here on; says which one that is."""
        device = outputs[0].device if outputs and isinstance(outputs[0], torch.Tensor) else None
        if device is not None and self.device != str(device):
            self.device, self.clock = str(device), clock_for(device)
        return self.device

    def load(self) -> None:
        """A loader begins to make samples: the phase is "data" until this is left."""
        self.enter("data")
        if self.on and not self._loading:
            self._loading = len(self._stack)

    def enter(self, phase: Phase) -> None:
        """Goes into a phase, inside the one that is on."""
        if self.loading and phase not in RANK_PHASES:
            self._stack.append("data")
        elif self.on:
            self._stack.append(phase)
            self._mark(phase)

    def leave(self) -> None:
        """Goes back to the phase around."""
        if self.on and len(self._stack) > 1:
            left = self._stack.pop()
            if len(self._stack) < self._loading:
                self._loading = 0
            if not (self.loading and left == "data"):
                self._mark(self._stack[-1])

    def turn(self, phase: Phase) -> None:
        """From now on, the level that is on is in this phase."""
        if self.on and self._stack[-1] != phase and not self.loading:
            self._stack[-1] = phase
            self._mark(phase)

    def end(self, at: Any = None) -> list[tuple[Any, Phase]]:
        """Ends the step, at a mark of the clock's or now: the marks, each with the phase that began there; the last is the end."""
        self._marks.append((self.instant() if at is None else at, "unattributed"))
        self.on = False
        marks, self._marks, self._grounds = self._marks, [], []
        return marks

    def instant(self) -> Any:
        """A mark of the clock's, for the edge of a step."""
        return self.clock.mark(idle=self.on)

    def replace_last(self, phase: Phase, instead: Phase) -> None:
        """The loop wasn't in a phase after all where nothing else was seen of late, back to where it was in another one."""
        found = list(takewhile(lambda at: self._marks[at][1] == phase, reversed(self._grounds)))
        for at in found:
            self._marks[at] = self._marks[at][0], instead
        if found:
            self.amended(found, instead)

    def _mark(self, phase: Phase) -> None:
        if len(self._marks) < _MAX_MARKS:
            if len(self._stack) == 1:
                self._grounds.append(len(self._marks))
            self._marks.append((self.clock.mark(), phase))


def durations(marks: list[tuple[Any, Phase]], clock: StepClock, mark_ms: float = 0.0) -> dict[Phase, float]:
    """Milliseconds in each phase; they add up to the time from the first mark to the last, less what marking took.

    Between the things that are seen, a thread that runs is taken to run the loop's own code; while it doesn't, nobody knows
    what it waits for.

    Args:
        mark_ms: what leaving a mark takes.
    """
    found: dict[Phase, float] = {}
    for (first, phase), (last, _) in pairwise(marks):
        ms = max(0.0, clock.ms(first, last) - mark_ms)
        idle = min(ms, clock.idle_ms(first, last)) if phase in _DEDUCED_PHASES else 0.0
        found[phase] = found.get(phase, 0.0) + ms - idle
        if idle:
            found["unattributed"] = found.get("unattributed", 0.0) + idle
    return found
