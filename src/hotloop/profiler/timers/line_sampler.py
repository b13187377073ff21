"""Samples of where the thread that trains is, in the user's own lines."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from hotloop.profiler.base.step_facts import ProfileFacts
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.profiler.timers.line_tracer import Line
from hotloop.profiler.timers.markers import PhaseOfLines

INTERVAL_S = 0.001

MIN_INTERVAL_S = 0.00005
"""Of short steps a tenth, but at least so long, which is about what a machine can sleep."""

_SAMPLES_PER_STEP = 10
"""So often is a step looked at."""

SWITCH_INTERVAL_S = 0.0002
"""How long the thread that trains may keep the interpreter when it is to be looked at.

With Python's own 5 ms, a stretch of plain Python that is shorter would always be over, and its time be given to the first
line after it that lets go of the interpreter.
"""

_MAX_LINES = 10_000
"""Different lines at most."""

_STEP_LIBRARIES = ("torch", "numpy", "contextlib", "array_api_compat", "cupy", "random")
"""What a step that hotloop writes goes through."""

_MAX_RECORDS = 500
"""Lines that are given at most, those that take longest."""

_BACKWARD_FUNCTION = "_engine_run_backward"

_WATCHING = ("hotloop.profiler", "hotloop.scripts")
_WRAPPER_FUNCTIONS = ("call", "heard", "epoch")
"""Functions of the watch's inside of which the script goes on."""


@dataclass(slots=True)
class _LineTotals:
    """Seconds of a line, with and without others that it called, and samples in which it called none."""

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
    """One at the stack: the mark of the timeline before it, seconds, and lines, each with whether it's innermost."""

    mark: int
    passed_s: float
    seen: list[tuple[StackLine, bool]] = field(default_factory=list)


_NOTHING_S = 1e-9
"""That is left of a sum of seconds from which all were taken, at most."""

_AMENDED_PHASE: Phase = "loss"
"""That it was in this phase may turn out to be wrong, when the same network is called again; see `Timeline.replace_last`."""


@hide_from_compiler
class StackSampler:
    """Looks at the stack of one thread about every millisecond between `begin()` and `end()`, from a thread of its own; in
    steps that are shorter than ten milliseconds more often, and from a random instant on.

    A sample stands for the time since the one before. The thread exists from the first `begin()` to `close()`, and
    waits between steps.

    Attributes:
        looks: samples in each phase, by whoever watches the phases.
        turned: seconds of each such phase in each that the lines say.
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
        """
        Args:
            is_own: whether code is the user's, and not a library's.
            place: `file:line`, as records give it.
            current_phase: of the step; it is asked from the sampling thread.
            turn: says the phase by the lines that run, too.
            last_mark: of the timeline that says the phase; see `amend`.
        """
        self._is_own, self._place, self._phase, self._interval_s = is_own, place, current_phase, interval_s
        self._line_phase, self._last_mark = turn, last_mark
        self._recent_samples: list[_StackSample] = []
        self._own: dict[CodeType, bool] = {}
        self._spent: dict[StackLine, _LineTotals] = defaultdict(_LineTotals)
        self._callers: dict[StackLine, Counter[Line]] = defaultdict(Counter)
        self._lock = threading.Lock()
        self._on, self._closed = threading.Event(), False
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
        """A step starts, on this thread."""
        self._sampled, self._since = threading.get_ident(), time.perf_counter()
        self._began, self._recent_samples = self._since, []
        self._steps += 1
        spent = {seen: replace(one) for seen, one in self._spent.items()}
        self._before = spent, self.samples.copy(), self.shifted_s.copy()
        if not self._running:
            self._running = os.getpid()
            _thread.start_new_thread(self._run, ())  # not one of threading's, all of which a script may wait for
        if not self._on.is_set():
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._switch_s, SWITCH_INTERVAL_S, self._pause_s / 2))
        self._on.set()

    def end(self) -> None:
        """The step has ended; once this returns, nothing is looked at any more."""
        if self._on.is_set():
            self._on.clear()
            self._took_s = time.perf_counter() - self._began
            sys.setswitchinterval(self._switch_s)
        with self._lock:
            pass

    def drop(self) -> None:
        """The step has ended, and wasn't like the others: what was seen in it is forgotten."""
        if self._on.is_set():
            self.end()
            spent, self.samples, self.shifted_s = self._before
            self._spent = defaultdict(_LineTotals, spent)
            self._steps -= 1

    def close(self) -> None:
        """Stops for good, in the middle of a step, too; what was seen stays."""
        self.end()
        self._closed = True
        self._on.set()
        if self._running == os.getpid():  # a fork has no such thread
            self._over.wait()
        self._running = 0

    def lines(self) -> list[LineTime]:
        """Lines per step, the longest first."""
        with self._lock:
            spent = sorted(self._spent.items(), key=lambda item: -item[1].all_s)
        per_step = 1e3 / max(1, self._steps)
        place = cache(self._place)
        return [
            LineTime(
                where=place(seen.file, seen.line),
                function=seen.function,
                library=seen.library,
                phase=seen.phase,
                ms=one.all_s * per_step,
                own_ms=one.own_s * per_step,
                within=self._merge_recent(seen, place),
                looks=one.samples,
            )
            for seen, one in spent[:_MAX_RECORDS]
        ]

    def _merge_recent(self, seen: StackLine, place: Callable[[str, int], str]) -> str:
        callers = self._callers[seen].most_common(1)
        return place(*callers[0][0]) if callers else ""

    @property
    def _pause_s(self) -> float:
        """Between two looks, by how long the step before took."""
        return min(self._interval_s, max(MIN_INTERVAL_S, self._took_s / _SAMPLES_PER_STEP))

    def _run(self) -> None:
        step = 0
        try:
            while self._on.wait() and not self._closed:
                first, step = step != self._steps, self._steps
                time.sleep(self._pause_s * (self._random.random() if first else 1.0))
                with self._lock:
                    if self._on.is_set() and not self._closed and step == self._steps:
                        self.sample(sys._current_frames().get(self._sampled), time.perf_counter())
        finally:
            self._over.set()

    def sample(self, frame: FrameType | None, now: float) -> None:
        """Notes the lines on a stack, for the time since the last sample."""
        passed, self._since = now - self._since, now
        ground, mark, known = self._phase(), self._last_mark(), set()
        if frame is None or ground == "unattributed" or self._is_watching(frame):
            return
        stack = list(self._stack(frame))
        phase = self._line_phase(ground, [(code.co_filename, line) for code, line, _ in stack])
        self.samples[ground] += 1
        self.shifted_s[ground, phase] += passed
        look = _StackSample(mark, passed)
        if ground == _AMENDED_PHASE:
            self._recent_samples.append(look)
        for number, (code, line, library) in enumerate(stack):
            seen = StackLine(code.co_filename, line, code.co_qualname, library, phase)
            if seen in known or (seen not in self._spent and len(self._spent) >= _MAX_LINES):
                continue
            known.add(seen)
            look.seen.append((seen, not number))
            spent = self._spent[seen]
            spent.all_s += passed
            if not number:
                spent.own_s += passed
                spent.samples += 1
            if number + 1 < len(stack):
                caller, at, _ = stack[number + 1]
                self._callers[seen][caller.co_filename, at] += 1

    def amend(self, marks: Collection[int], phase: Phase) -> None:
        """What was seen in this step since these marks of the timeline was in another phase than it said at the time."""
        with self._lock:
            found = [look for look in self._recent_samples if look.mark in marks]
            self._recent_samples = [look for look in self._recent_samples if look.mark not in marks]
            for look in found:
                self.samples[_AMENDED_PHASE] -= 1
                self.samples[phase] += 1
                for seen, innermost in look.seen:
                    before, after = self._spent[seen], self._spent[moved := seen._replace(phase=phase)]
                    self._callers[moved] = self._callers[moved] or self._callers[seen].copy()
                    for spent, sign in ((before, -1), (after, 1)):
                        spent.all_s += sign * look.passed_s
                        spent.own_s += sign * look.passed_s * innermost
                        spent.samples += sign * innermost
                    if before.all_s <= _NOTHING_S:
                        del self._spent[seen]
                    if innermost:
                        self.shifted_s[_AMENDED_PHASE, seen.phase] -= look.passed_s
                        self.shifted_s[phase, phase] += look.passed_s

    def _stack(self, innermost: FrameType) -> Iterator[tuple[CodeType, int, str]]:
        """The user's lines from the innermost on; without any, the innermost line of a library.

        In a Task nothing from its step outwards, and no line of torch's own: the step is hotloop's to write.
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
                called = "torch" if backward else library  # whoever calls the backward, torch computes it
                instead = instead if instead is not None or library in _STEP_LIBRARIES else frame
            frame = frame.f_back
        if not found:
            yield innermost.f_code, innermost.f_lineno, library_of(innermost)

    def _is_watching(self, innermost: FrameType) -> bool:
        """Whether the thread does what watching takes, rather than what is watched."""
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
def library_of(frame: FrameType) -> str:
    """The package that a frame's code belongs to."""
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


_ENOUGH_SAMPLES = 30
"""Looks at the stack in a phase, that say more than a traced step, in which plain Python takes many times as long."""


class LinePhases:
    """Says the phase of lines that run between the things that are seen; it is made where a step ends.

    What stands after the line that ends a step, or after the call of a helper that it is in, belongs to the end of the
    step, and is no making of a batch where no loader says when the next step's data begin. What stands before it is no
    longer the update that an update by hand is.
    """

    def __init__(self, sites: CallSites, facts: ProfileFacts) -> None:
        self._facts, self._around = facts, sites.functions_on_stack()

    def phase(self, phase: Phase, lines: Iterable[Line | None]) -> Phase:
        """The phase of what runs there.

        Args:
            phase: as the timeline has it.
            lines: of the user's that are on the stack, in any order.
        """
        facts = self._facts
        if not facts.anchor or not (phase == "update" if facts.by_hand else phase == "batch"):
            return phase
        after = self._after({line for line in lines if line is not None})
        if facts.by_hand and after < 0:
            return "forward" if facts.functional else "batch"
        return "python" if after > 0 and not facts.by_hand else phase

    def _after(self, lines: set[Line]) -> int:
        """How far after the line that ends a step, or after the call that leads there; the innermost function says so."""
        for file, ends, numbers in self._around:
            for where, line in lines:
                if where == file and line in numbers and line != ends:
                    return line - ends
        return 0


def phase_shares(
    traced: Sequence[Mapping[tuple[Phase, Phase], float]],
    sampled: Mapping[tuple[Phase, Phase], float],
    looks: Mapping[Phase, int],
) -> list[tuple[Phase, Phase, float]]:
    """As `ProfileFacts.turned`: by looks at the stack where there are enough, else the median over the traced steps.

    Args:
        traced, sampled: the time of each phase of the timeline in each that the lines say.
        looks: how many there were in each phase of the timeline.
    """
    pairs = {pair for step in (*traced, sampled) for pair in step if pair[0] != pair[1]}
    found = []
    for ground, phase in pairs:
        steps = [sampled] if looks.get(ground, 0) >= _ENOUGH_SAMPLES else traced or [sampled]
        found.append((ground, phase, median(_phase_share(step, ground, phase) for step in steps)))
    return sorted(one for one in found if one[2])


def _phase_share(step: Mapping[tuple[Phase, Phase], float], ground: Phase, phase: Phase) -> float:
    """Of the time in which the timeline was in a phase: what the lines say was another."""
    total = sum(took for (around, _), took in step.items() if around == ground)
    return step.get((ground, phase), 0) / total if total else 0.0


def shift_phases(phases: Mapping[Phase, float], shares: Iterable[tuple[Phase, Phase, float]]) -> dict[Phase, float]:
    """Phases of a step with shares of some given to others; they add up as before.

    Args:
        shares: from which phase to which, and which part of it.
    """
    found = dict(phases)
    for source, target, share in shares:
        moved = phases.get(source, 0.0) * share
        if moved:
            found[source] -= moved
            found[target] = found.get(target, 0.0) + moved
    return found
