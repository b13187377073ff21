"""Samples the stack of the training thread, by user lines."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from random import Random
from statistics import median
from types import CodeType, FrameType
from typing import NamedTuple

from hotloop.core.records.profile import LineTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.call_sites import CallSites, is_step
from hotloop.profiler.base.steps import ProfileFacts
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.profiler.timers.line_tracer import Line, PhaseOfLines

INTERVAL_S = 0.001
MIN_INTERVAL_S = 0.00005
"""Shortest interval: about the resolution of sleep. Short steps get a tenth of their duration."""

_SAMPLES_PER_STEP = 10

SWITCH_INTERVAL_S = 0.0002
"""Longest time the training thread keeps the GIL while sampled.

With Python's default of 5 ms, shorter runs of plain Python would be missed, and their time counted to the next line
that releases the GIL.
"""

_READY_S = 0.01
"""Longest wait for the sampling thread at the start of a step."""

_MAX_LINES = 10_000

_STEP_LIBRARIES = ("torch", "numpy", "contextlib", "array_api_compat", "cupy", "random")
"""Libraries that a step written by hotloop calls."""

_MAX_RECORDS = 500

_BACKWARD_FUNCTION = "_engine_run_backward"

_WATCHING = ("hotloop.profiler", "hotloop.scripts")
_WRAPPER_FUNCTIONS = ("call", "epoch")
"""Names of profiler functions inside which user code runs."""


@dataclass(slots=True)
class _LineTotals:
    """Seconds of a line with and without its callees; samples with the line innermost."""

    all_s: float = 0.0
    own_s: float = 0.0
    samples: int = 0


class StackLine(NamedTuple):
    """A line on the stack: file, number, function, the library that it called into, and the step's phase."""

    file: str
    line: int
    function: str
    library: str
    phase: Phase


@dataclass(slots=True)
class _StackSample:
    """Number of the last timeline mark, seconds, phases by timeline and lines, and lines, each with whether it is innermost."""

    mark: int
    passed_s: float
    shift: tuple[Phase, Phase]
    lines: list[tuple[StackLine, bool]] = field(default_factory=list)


_NOTHING_S = 1e-9
"""Largest rounding residue of a sum of seconds from which all terms were subtracted."""

_UNCONFIRMED = 256
"""Samples from which the time without a core may still be subtracted: it is known once the thread runs again."""

_AMENDED_PHASE: Phase = "loss"
"""The phase that `Timeline.replace_last` may correct."""


@hide_from_compiler
class StackSampler:
    """Samples one thread's stack between `begin()` and `end()`, from a thread of its own.

    The interval is 1 ms, less in steps under 10 ms, with a random start. A sample counts for the time since the
    previous sample. The thread lives from the first `begin()` to `close()`, and waits between steps.

    Attributes:
        samples: number of samples per timeline phase.
        shifted_s: seconds per pair of timeline phase and phase by lines.
    """

    def __init__(
        self,
        is_own: Callable[[CodeType], bool],
        place: Callable[[str, int], str],
        current_phase: Callable[[], Phase] = lambda: "python",
        interval_s: float = INTERVAL_S,
        turn: PhaseOfLines = lambda phase, lines: phase,
        last_mark: Callable[[], int] = lambda: 0,
    ) -> None:
        """Args:
        is_own: whether code is user code.
        place: formats `file:line`.
        current_phase: the step's phase; called by the sampling thread.
        turn: corrects the phase by the running lines.
        last_mark: number of the timeline's last mark; see `amend`.
        """
        self._is_own, self._place, self._phase, self._interval_s = is_own, place, current_phase, interval_s
        self._line_phase, self._last_mark = turn, last_mark
        self._recent_samples: list[_StackSample] = []
        self._last_samples: deque[_StackSample] = deque(maxlen=_UNCONFIRMED)
        self._preemption = Preemption()
        self._own: dict[CodeType, bool] = {}
        self._spent: dict[StackLine, _LineTotals] = defaultdict(_LineTotals)
        self._callers: dict[StackLine, Counter[Line]] = defaultdict(Counter)
        self._lock = threading.Lock()
        self._on, self._ready, self._closed = threading.Event(), threading.Event(), False
        self._running, self._over = 0, threading.Event()
        self._sampled = 0
        self._steps, self._since = 0, 0.0
        self._began, self._took_s = 0.0, inf
        self._random = Random(0)
        self.samples: Counter[Phase] = Counter()
        self.shifted_s: dict[tuple[Phase, Phase], float] = defaultdict(float)
        self._before: tuple[dict[StackLine, _LineTotals], Counter[Phase], dict[tuple[Phase, Phase], float]]
        self._switch_s = sys.getswitchinterval()

    def begin(self) -> None:
        """Begins a step once the sampling thread runs: a thread that wakes up in a step would miss the step's start."""
        self._sampled, self._recent_samples = threading.get_ident(), []
        self._preemption.begin()
        self._steps += 1
        self._ready.clear()
        spent = {line: replace(totals) for line, totals in self._spent.items()}
        self._before = spent, self.samples.copy(), self.shifted_s.copy()
        if not self._running:
            self._running = os.getpid()
            _thread.start_new_thread(self._run, ())  # scripts may join all of threading's threads
        if not self._on.is_set():
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._switch_s, SWITCH_INTERVAL_S, self._pause_s / 2))
        self._on.set()
        self._ready.wait(_READY_S)
        self._began = self._since = time.perf_counter()

    def end(self) -> None:
        """Ends the step; no sample is taken after the return."""
        if self._on.is_set():
            self._on.clear()
            self._took_s = time.perf_counter() - self._began
            sys.setswitchinterval(self._switch_s)
        with self._lock:
            pass

    def drop(self) -> None:
        if self._on.is_set():
            self.end()
            self._last_samples.clear()
            spent, self.samples, self.shifted_s = self._before
            self._spent = defaultdict(_LineTotals, spent)
            self._steps -= 1

    def close(self) -> None:
        self.end()
        self._closed = True
        self._on.set()
        if self._running == os.getpid():  # a fork has no such thread
            self._over.wait()
        self._running = 0

    def lines(self) -> list[LineTime]:
        """Returns lines with times per step, the longest first."""
        with self._lock:
            spent = sorted(self._spent.items(), key=lambda item: -item[1].all_s)
        per_step = 1e3 / max(1, self._steps)
        place = cache(self._place)
        return [
            LineTime(
                where=place(line.file, line.line),
                function=line.function,
                library=line.library,
                phase=line.phase,
                ms=totals.all_s * per_step,
                own_ms=totals.own_s * per_step,
                within=self._main_caller(line, place),
                looks=totals.samples,
            )
            for line, totals in spent[:_MAX_RECORDS]
        ]

    def _main_caller(self, line: StackLine, place: Callable[[str, int], str]) -> str:
        callers = self._callers[line].most_common(1)
        return place(*callers[0][0]) if callers else ""

    @property
    def _pause_s(self) -> float:
        """Interval, by the duration of the previous step."""
        return min(self._interval_s, max(MIN_INTERVAL_S, self._took_s / _SAMPLES_PER_STEP))

    def _run(self) -> None:
        step = 0
        try:
            while self._on.wait() and not self._closed:
                first, step = step != self._steps, self._steps
                if first:
                    self._ready.set()
                time.sleep(self._pause_s * (self._random.random() if first else 1.0))
                with self._lock:
                    if self._on.is_set() and not self._closed and step == self._steps:
                        self.sample(sys._current_frames().get(self._sampled), time.perf_counter())
        finally:
            self._over.set()

    def sample(self, frame: FrameType | None, now: float) -> None:
        passed, self._since = now - self._since, now
        passed -= self._subtract_preemption(passed)
        ground, mark, known = self._phase(), self._last_mark(), set()
        if frame is None or ground == "unattributed" or self._is_watching(frame):
            return
        stack = list(self._stack(frame))
        phase = self._line_phase(ground, [(code.co_filename, line) for code, line, _ in stack])
        self.samples[ground] += 1
        self.shifted_s[ground, phase] += passed
        sample = _StackSample(mark, passed, (ground, phase))
        self._last_samples.append(sample)
        if ground == _AMENDED_PHASE:
            self._recent_samples.append(sample)
        for number, (code, line, library) in enumerate(stack):
            seen = StackLine(code.co_filename, line, code.co_qualname, library, phase)
            if seen in known or (seen not in self._spent and len(self._spent) >= _MAX_LINES):
                continue
            known.add(seen)
            sample.lines.append((seen, not number))
            spent = self._spent[seen]
            spent.all_s += passed
            if not number:
                spent.own_s += passed
                spent.samples += 1
            if number + 1 < len(stack):
                caller, at, _ = stack[number + 1]
                self._callers[seen][caller.co_filename, at] += 1

    def _subtract_preemption(self, passed_s: float) -> float:
        """Subtracts the time without a core from the last samples; returns the part of it in the last `passed_s`."""
        lost_s = self._preemption.passed_s()
        own_s = min(lost_s, passed_s)
        lost_s -= own_s
        while lost_s > 0 and self._last_samples:
            sample = self._last_samples[-1]
            took_s = min(lost_s, sample.passed_s)
            lost_s, sample.passed_s = lost_s - took_s, sample.passed_s - took_s
            self.shifted_s[sample.shift] -= took_s
            for seen, innermost in sample.lines:
                self._spent[seen].all_s -= took_s
                self._spent[seen].own_s -= took_s * innermost
            if sample.passed_s <= 0:
                self._last_samples.pop()
        return own_s

    def amend(self, marks: Collection[int], phase: Phase) -> None:
        """Moves this step's samples at some timeline marks to another phase."""
        with self._lock:
            found = [sample for sample in self._recent_samples if sample.mark in marks]
            self._recent_samples = [sample for sample in self._recent_samples if sample.mark not in marks]
            for sample in found:
                self.samples[_AMENDED_PHASE] -= 1
                self.samples[phase] += 1
                lines, sample.shift = sample.lines, (phase, phase)
                sample.lines = [(seen._replace(phase=phase), innermost) for seen, innermost in lines]
                for seen, innermost in lines:
                    before, after = self._spent[seen], self._spent[moved := seen._replace(phase=phase)]
                    self._callers[moved] = self._callers[moved] or self._callers[seen].copy()
                    for spent, sign in ((before, -1), (after, 1)):
                        spent.all_s += sign * sample.passed_s
                        spent.own_s += sign * sample.passed_s * innermost
                        spent.samples += sign * innermost
                    if before.all_s <= _NOTHING_S:
                        del self._spent[seen]
                    if innermost:
                        self.shifted_s[_AMENDED_PHASE, seen.phase] -= sample.passed_s
                        self.shifted_s[phase, phase] += sample.passed_s

    def _stack(self, innermost: FrameType) -> Iterator[tuple[CodeType, int, str]]:
        """Yields user lines, innermost first; without any, the innermost library line.

        In a Task, frames outside the step and lines of torch are left out: hotloop writes the step.
        """
        called, found, backward = "", False, False
        frame: FrameType | None = innermost
        instead: FrameType | None = None
        while frame is not None:
            if self._owns(frame.f_code):
                yield frame.f_code, frame.f_lineno, called
                called, found, backward = "", True, False
            elif is_step(frame.f_code):
                found, innermost = found or instead is None, instead or innermost
                break
            elif (library := library_of(frame)) != "hotloop":
                backward = backward or (library == "torch" and frame.f_code.co_name == _BACKWARD_FUNCTION)
                called = "torch" if backward else library  # torch computes the backward, also for a library's call
                instead = instead if instead is not None or library in _STEP_LIBRARIES else frame
            frame = frame.f_back
        if not found:
            yield innermost.f_code, innermost.f_lineno, library_of(innermost)

    def _is_watching(self, innermost: FrameType) -> bool:
        """Whether the thread runs the profiler's own work."""
        frame: FrameType | None = innermost
        while frame is not None and not self._owns(frame.f_code):
            name = str(frame.f_globals.get("__name__") or "")
            if name.startswith(_WATCHING) and frame.f_code.co_name not in _WRAPPER_FUNCTIONS:
                return True
            if name.startswith("hotloop.") and not name.startswith(_WATCHING):
                return False
            frame = frame.f_back
        return False

    def _owns(self, code: CodeType) -> bool:
        own = self._own.get(code)
        if own is None:
            own = self._own[code] = self._is_own(code)
        return own


@hide_from_compiler
class Preemption:
    """Seconds in which the thread of `begin` could run, and another program had the core; 0 where the system can't tell."""

    def __init__(self) -> None:
        self._file, self._thread, self._last_s = -1, 0, 0.0

    def begin(self) -> None:
        if self._thread != (thread := threading.get_native_id()):
            self._close()
            self._thread = thread
            with suppress(OSError):
                self._file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._last_s = self._read_s()

    def passed_s(self) -> float:
        """Returns the seconds since the last call."""
        before, self._last_s = self._last_s, self._read_s()
        return max(0.0, self._last_s - before)

    def _read_s(self) -> float:
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a kernel without these figures
            return self._last_s

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = _close


@hide_from_compiler
def library_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


_ENOUGH_SAMPLES = 30
"""Samples in a phase that are more reliable than a traced step, which slows plain Python."""


class LinePhases:
    """Corrects phases by the running lines; created where a step ends.

    Lines after the one that ends a step belong to the step's end, and make no batch if no loader marks the next step.
    Lines before it are not part of a hand-written update.
    """

    def __init__(self, sites: CallSites, facts: ProfileFacts) -> None:
        self._facts, self._around = facts, sites.functions_on_stack()

    def phase(self, phase: Phase, lines: Iterable[Line | None]) -> Phase:
        """Returns the phase of running code, by the timeline's phase and the user lines on the stack, in any order."""
        facts = self._facts
        if not facts.anchor or not (phase == "update" if facts.by_hand else phase == "batch"):
            return phase
        after = self._after({line for line in lines if line is not None})
        if facts.by_hand and after < 0:
            return "forward" if facts.functional else "batch"
        return "python" if after > 0 and not facts.by_hand else phase

    def _after(self, lines: set[Line]) -> int:
        """Line distance from the step's end, or from the call that leads there, in the innermost common function."""
        for file, ends, numbers in self._around:
            for where, line in lines:
                if where == file and line in numbers and line != ends:
                    return line - ends
        return 0


def phase_shares(
    traced: Sequence[Mapping[tuple[Phase, Phase], float]],
    sampled: Mapping[tuple[Phase, Phase], float],
    samples: Mapping[Phase, int],
) -> list[tuple[Phase, Phase, float]]:
    """Returns `ProfileFacts.turned`: by samples if there are enough, else medians over the traced steps.

    Args:
        traced, sampled: time per pair of timeline phase and phase by lines.
        samples: number of samples per timeline phase.
    """
    pairs = {pair for step in (*traced, sampled) for pair in step if pair[0] != pair[1]}
    shares = []
    for ground, phase in pairs:
        steps = [sampled] if samples.get(ground, 0) >= _ENOUGH_SAMPLES else traced or [sampled]
        shares.append((ground, phase, median(_phase_share(step, ground, phase) for step in steps)))
    return sorted(share for share in shares if share[2])


def _phase_share(step: Mapping[tuple[Phase, Phase], float], ground: Phase, phase: Phase) -> float:
    total = sum(took for (around, _), took in step.items() if around == ground)
    return step.get((ground, phase), 0) / total if total else 0.0


def shift_phases(phases: Mapping[Phase, float], shares: Iterable[tuple[Phase, Phase, float]]) -> dict[Phase, float]:
    """Moves shares (source, target, share of the source) between phases; the sum stays."""
    shifted = dict(phases)
    for source, target, share in shares:
        if moved := phases.get(source, 0.0) * share:
            shifted[source] -= moved
            shifted[target] = shifted.get(target, 0.0) + moved
    return shifted
