"""A timeline of one step in which each instant belongs to exactly one phase.

The phases lie on a stack: what is inside a forward is of the forward, unless it is something of its own such as a copy.
Where nothing is on the stack, the ground says what the loop is doing between the things that can be seen.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Protocol

import torch

from hotloop.profiles import Phase

_MOST_MARKS = 20_000
"""In one step; what comes then belongs to the phase it is in, so that memory stays bounded."""


class Clock(Protocol):
    """Marks instants, and says later how far apart they were."""

    def mark(self) -> Any: ...
    def ms(self, first: Any, last: Any) -> float: ...
    def passed(self, mark: Any) -> bool:
        """Whether that instant has come, so that `ms` can be asked."""


class HostClock:
    """The process's own time."""

    mark = staticmethod(time.perf_counter)

    def ms(self, first: float, last: float) -> float:
        return (last - first) * 1e3

    def passed(self, mark: float) -> bool:
        return True


class DeviceClock:
    """When the device comes to each mark in its queue of work; it never waits for the device.

    Where the device is behind, the time between two marks is that of the work between them; where it waits for the host,
    it's the host's time. Either way the phases add up to what passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def ms(self, first: torch.Event, last: torch.Event) -> float:
        return first.elapsed_time(last)

    def passed(self, mark: torch.Event) -> bool:
        return mark.query()


def clock_for(device: torch.device) -> Clock:
    """The clock of steps that compute on a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Timeline:
    """The phases of one step at a time; costs nothing while no step is on.

    Attributes:
        on: whether a step is being watched.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.on = False
        self._stack: list[Phase] = ["python"]
        self._marks: list[tuple[Any, Phase]] = []

    @property
    def current(self) -> Phase:
        """What the step is doing now; may be asked from other threads."""
        return self._stack[-1] if self.on else "unattributed"

    @property
    def depth(self) -> int:
        return len(self._stack)

    def begin(self, ground: Phase) -> None:
        """Begins a step."""
        self._stack, self._marks, self.on = [ground], [], True
        self._marks.append((self.clock.mark(), ground))

    def enter(self, phase: Phase) -> None:
        """Goes into a phase, inside the one that is on."""
        if self.on:
            self._stack.append(phase)
            self._mark(phase)

    def leave(self, *, keep: bool = True) -> None:
        """Goes back to the phase around; with `keep=False` what just was never happened, if nothing happened in it."""
        if not self.on or len(self._stack) == 1:
            return
        left = self._stack.pop()
        if not keep and self._marks[-1][1] == left and len(self._marks) > 1:
            self._marks.pop()
        else:
            self._mark(self._stack[-1])

    def turn(self, phase: Phase) -> None:
        """From now on, the level that is on is in this phase."""
        if self.on and self._stack[-1] != phase:
            self._stack[-1] = phase
            self._mark(phase)

    def end(self) -> list[tuple[Any, Phase]]:
        """Ends the step: the marks, each with the phase that began there; the last is the end."""
        self.on = False
        self._marks.append((self.clock.mark(), "unattributed"))
        marks, self._marks = self._marks, []
        return marks

    def _mark(self, phase: Phase) -> None:
        if len(self._marks) < _MOST_MARKS:
            self._marks.append((self.clock.mark(), phase))


def durations(marks: list[tuple[Any, Phase]], clock: Clock) -> dict[Phase, float]:
    """Milliseconds in each phase; they add up to the time from the first mark to the last."""
    found: dict[Phase, float] = {}
    for (first, phase), (last, _) in pairwise(marks):
        found[phase] = found.get(phase, 0.0) + clock.ms(first, last)
    return found
