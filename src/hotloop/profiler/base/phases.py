"""The timeline of a step: each instant belongs to exactly one phase. Also light steps, of which only the end is marked.

Phases are nested on a stack. What runs inside a forward belongs to the forward, except operations with a phase of their
own such as copies. While a loader makes samples, all work is "data": transforms may call modules, copy, read numbers.
The bottom of the stack (the ground) is the phase of the loop between recorded operations.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.steps import DISTURBING, StepFact

if sys.platform == "linux":
    import resource

_MAX_MARKS = 20_000
"""Marks per step; time after the last mark counts to its phase. The limit bounds memory."""

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds this thread ran, nanoseconds it waited for a core, number of time slices."""

RANK_PHASES: tuple[Phase, ...] = ("waiting", "communication")

_DEDUCED_PHASES: tuple[Phase, ...] = ("python", "batch", "loss")
"""Phases of the loop between recorded operations."""


class StepClock(Protocol):
    """A clock that marks instants; durations are read later."""

    def mark(self, *, idle: bool = True) -> Any:
        """Marks the current instant; `idle` says whether `idle_ms` will be asked of the mark."""

    def ms(self, first: Any, last: Any) -> float: ...
    def idle_ms(self, first: Any, last: Any) -> float:
        """Milliseconds in which the marking thread waited, as far as known."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the instant has been reached, so that `ms` can be asked."""


class Instant(NamedTuple):
    """Wall time, and of one thread: CPU time, voluntary context switches, seconds in the run queue."""

    wall_s: float
    cpu_s: float
    waits: int
    queued_s: float = 0.0


class HostClock:
    def __init__(self) -> None:
        self._switches, self._queued_s = -1, 0.0

    def mark(self, *, idle: bool = True) -> Instant:
        if not idle:  # only the length is wanted: CPU times would add overhead
            return Instant(time.perf_counter(), 0.0, 0)
        if sys.platform != "linux":  # waits are counted on Linux only
            return Instant(time.perf_counter(), time.thread_time(), 0)
        now, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD)
        switches = used.ru_nvcsw + used.ru_nivcsw
        if switches != self._switches:  # the thread may have queued; reading the file is slow
            self._switches, self._queued_s = switches, _queued_s()
        return Instant(now, used.ru_utime + used.ru_stime, used.ru_nvcsw, self._queued_s)

    def ms(self, first: Instant, last: Instant) -> float:
        return (last.wall_s - first.wall_s) * 1e3

    def idle_ms(self, first: Instant, last: Instant) -> float:
        """Time in the run queue is no waiting: other threads had the core."""
        ran_s = last.cpu_s - first.cpu_s + last.queued_s - first.queued_s
        return max(0.0, self.ms(first, last) - ran_s * 1e3) if last.waits > first.waits else 0.0

    def has_passed(self, mark: Instant) -> bool:
        return True


def _queued_s() -> float:
    """Seconds that this thread waited for a core; 0 if the system doesn't report them."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class DeviceClock:
    """The times at which the device reaches marks in its work queue; the host never waits for the device.

    If the device is the bottleneck, the time between two marks is that of the device's work; else, the host's time.
    Either way the phases add up to the elapsed time.
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
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Timeline:
    """The phases of one step at a time; costs nothing between steps.

    Attributes:
        on: whether a step is recorded.
        device: the device whose clock is used.
        amended: is called with the numbers of marks whose phase is corrected, and the new phase.
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
        """The current phase; may be read by other threads."""
        return self._stack[-1] if self.on else "unattributed"

    @property
    def last_mark(self) -> int:
        """The number of the mark at which the current phase began."""
        return len(self._marks) - 1

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def loading(self) -> bool:
        """Whether a loader makes samples and no communication among ranks is on."""
        return self.on and self._loading > 0 and self._stack[-1] == "data"

    def begin(self, ground: Phase) -> None:
        self._stack, self._marks, self._grounds, self.on = [ground], [], [], True
        self._loading = 0
        self._mark(ground)

    def use_clock_of(self, outputs: Any) -> str:
        """Switches to the clock of the outputs' device; returns the device."""
        device = outputs[0].device if outputs and isinstance(outputs[0], torch.Tensor) else None
        if device is not None and self.device != str(device):
            self.device, self.clock = str(device), clock_for(device)
        return self.device

    def load(self) -> None:
        """A loader begins to make samples: the phase is "data" until the matching `leave`."""
        self.enter("data")
        if self.on and not self._loading:
            self._loading = len(self._stack)

    def enter(self, phase: Phase) -> None:
        if self.loading and phase not in RANK_PHASES:
            self._stack.append("data")
        elif self.on:
            self._stack.append(phase)
            self._mark(phase)

    def leave(self) -> None:
        if self.on and len(self._stack) > 1:
            left = self._stack.pop()
            if len(self._stack) < self._loading:
                self._loading = 0
            if not (self.loading and left == "data"):
                self._mark(self._stack[-1])

    def turn(self, phase: Phase) -> None:
        """Changes the phase of the current level."""
        if self.on and self._stack[-1] != phase and not self.loading:
            self._stack[-1] = phase
            self._mark(phase)

    def end(self, at: Any = None) -> list[tuple[Any, Phase]]:
        """Ends the step, at a clock mark or now.

        Returns:
            The marks, each with the phase that begins there; the last mark is the end.
        """
        self._marks.append((self.instant() if at is None else at, "unattributed"))
        self.on = False
        marks, self._marks, self._grounds = self._marks, [], []
        return marks

    def instant(self) -> Any:
        return self.clock.mark(idle=self.on)

    def replace_last(self, phase: Phase, instead: Phase) -> None:
        """Corrects the latest ground marks of one phase, back to the first ground mark of another phase."""
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
    """Returns milliseconds per phase; they add up to the time from first to last mark, less `mark_ms` per mark.

    Between recorded operations a running thread counts as the loop's own code; a waiting thread as "unattributed".
    """
    found: dict[Phase, float] = {}
    for (first, phase), (last, _) in pairwise(marks):
        ms = max(0.0, clock.ms(first, last) - mark_ms)
        idle = min(ms, clock.idle_ms(first, last)) if phase in _DEDUCED_PHASES else 0.0
        found[phase] = found.get(phase, 0.0) + ms - idle
        if idle:
            found["unattributed"] = found.get("unattributed", 0.0) + idle
    return found


_WARM_UP_MS = 20.0
_MAX_WARM_UP_STEPS = 64
"""Duration and number of steps after which Python's caches are warm; 20 ms change a longer step by less than 1 %."""

_MAX_EARLY_STEPS, _ENOUGH_MEASURED = 4, 24
"""Limit of skipped steps until enough steps are measured: a script may have few steps; see `without_cold_steps`."""

_OWN_FRAMES = 2
"""Profiler frames between `sys._getframe` and the optimizer: `ends_light_step` and torch's hook."""


class LightSpan:
    """A run of steps whose boundaries are found by comparing the frame that calls the optimizer.

    Full handling of a step boundary takes a sixth of a very short step, and cools the caches.

    Attributes:
        on: whether the current step is light: only updates that end the step in another way are recorded.
        left: number of steps to skip before the clean step.
        passed: number of skipped steps that are not yet counted by the step sequence.
        began: clock mark at which the current step began, if a skipped step ended there.
        ended: clock mark at which the clean step ended.
    """

    def __init__(self) -> None:
        self.on = False
        self.left = self.passed = 0
        self.began: Any = None
        self.ended: Any = None
        self._clock: StepClock
        self._last: Callable[[], None]
        self._thread = self._optimizer = self._depth = self._instruction = 0
        self._code: CodeType | None = None

    def begin(self, optimizer: Any, sites: CallSites, clock: StepClock, last: Callable[[], None]) -> bool:
        """Starts at an update that ends a step; False if no user line calls. `last` runs before the clean step."""
        frame, between = sites.caller_frame()
        if frame is None:
            return False
        self._thread, self._optimizer, self._depth = get_ident(), id(optimizer), _OWN_FRAMES + between
        self._code, self._instruction = frame.f_code, frame.f_lasti
        self._clock, self._last, self.ended = clock, last, None
        self.on = True
        return True

    def stop(self) -> bool:
        was, self.on, self.ended = self.on, False, None
        return was

    def ends_light_step(self, optimizer: Any) -> bool:
        """Returns whether a finished update ends a skipped step, which needs no further recording."""
        if not self.on or id(optimizer) != self._optimizer or get_ident() != self._thread:
            return False
        if not self.left:
            self.ended = self._clock.mark(idle=False)  # the rest of this call is profiler overhead
        try:
            frame = sys._getframe(self._depth)
        except ValueError:  # called from a shallower stack
            return False
        if not self.left or frame.f_lasti != self._instruction or frame.f_code is not self._code:
            return False
        self.left -= 1
        self.passed += 1
        if not self.left:
            self._last()
        self.began = self._clock.mark(idle=False)
        return True


def steps_until_warm(steps: Sequence[StepFact]) -> int:
    """Returns the number of steps to skip until Python's caches are warm after a disturbing step; 0 for long steps."""
    ms = next((step.ms for step in reversed(steps) if step.kind not in DISTURBING), 0.0)
    enough = sum(step.kind in ("clean", "instrumented") for step in steps) >= _ENOUGH_MEASURED
    needed = min(_MAX_WARM_UP_STEPS if enough else _MAX_EARLY_STEPS, int(_WARM_UP_MS / ms)) if ms else 0
    since = next((n for n, step in enumerate(reversed(steps)) if step.kind in DISTURBING), needed)
    return max(0, needed - since)


def without_cold_steps(measured: Sequence[StepFact]) -> Sequence[StepFact]:
    """Drops the first measured steps if steps are short (cold caches) and enough later steps exist."""
    later = measured[_ENOUGH_MEASURED:]
    if len(later) < _ENOUGH_MEASURED or median(step.ms for step in later) * _MAX_EARLY_STEPS > _WARM_UP_MS:
        return measured
    return later
