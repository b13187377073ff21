"""Steps: the event that ends one, how each is recorded, and the recorded facts.

Most steps are pairs of a clean and an instrumented step; few have detailed recording. Facts are plain values that are
passed between processes.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hotloop.core.format import parse_seconds

if TYPE_CHECKING:  # a script's process shall not import pydantic
    from hotloop.core.records.profile_terms import Phase

Kind = Literal[
    "early", "warm-up", "clean", "instrumented", "clocked", "habits", "traced", "sampled", "settling", "whole"
]
"""How a step is recorded.

- `early`: before the step is known: between two events that may end a step; with phases.
- `warm-up`: before measuring.
- `clean`: only the boundaries are marked.
- `instrumented`: with phases.
- `clocked`: with module times; each module call has overhead.
- `habits`: with autograd graphs walked; times are invalid.
- `traced`: under torch's profiler.
- `sampled`: another thread samples the stack, which slows the step if cores are scarce.
- `settling`: like a clean step, but after a disturbance; not counted.
- `whole`: a period of training in which no steps were found; with phases, modules and operators.
"""

CLOSE: tuple[Kind, ...] = ("early", "instrumented", "habits", "traced", "sampled", "whole")
"""Kinds with phases."""

DISTURBING: tuple[Kind, ...] = (*CLOSE, "clocked")
"""Kinds for which functions are replaced; Python's caches are cold afterwards."""

DEFAULT_STEPS = 60

REMEDY_RACE_S = 30.0
"""Seconds for racing remedies, or for compiling and racing a script's network, without a time limit."""


@dataclass(frozen=True)
class ProfileSettings:
    """How a script's steps are recorded: JSON values for its process.

    Attributes:
        steps: number of measured steps, then the script runs on alone; None for 60, fewer if these take over 30 s.
        trace: the absolute path of a file for the Chrome trace of a few steps; None for no trace.
        try_s: seconds for a race of the compiled network after the measured steps; the script waits. None: no race.
    """

    steps: int | None = None
    trace: str | None = None
    try_s: float | None = None

    @classmethod
    def of(cls, steps: int | None, trace: Path | None, *, tries: bool, time_limit: str | None) -> ProfileSettings:
        """Returns the settings of a command; raises HotloopError for a wrong time limit."""
        limit_s = REMEDY_RACE_S if time_limit is None or not tries else parse_seconds(time_limit, "time-limit")
        return cls(steps, None if trace is None else str(trace.resolve()), limit_s if tries else None)


DEFAULT_SETTINGS = ProfileSettings()


_PAIR: list[Kind] = ["clean", "instrumented"]
_PATTERN_STEP: list[Kind] = ["habits"]
_SAMPLED_STEP: list[Kind] = ["sampled"]
_CLOCKED_STEP: list[Kind] = ["clocked"]
_TRACED_STEP: list[Kind] = ["traced", "settling"]

_FIRST_DETAILS: list[Kind] = [*_TRACED_STEP, *_CLOCKED_STEP, *_PATTERN_STEP * 2, *_SAMPLED_STEP]
"""Some of everything, for scripts with few long steps; work done twice with a batch may fall into two steps."""

_SECOND_DETAILS: list[Kind] = [*_PATTERN_STEP * 2, *_TRACED_STEP * 2, *_SAMPLED_STEP, *_CLOCKED_STEP, "settling"]

# Two traced steps never follow each other: a step ends inside torch's profiler range of the update, and a range that is
# open when a profiler stops must not end under the next profiler.


def order(steps: int) -> list[Kind]:
    """Returns the kinds of all steps after warm-up; `steps` of them are clean or instrumented.

    An odd step is instrumented. No clock is used, so that ranks which take the same steps record them alike.
    """
    pairs, odd = divmod(steps, 2)
    # Thue-Morse order: work that a loop does every second, third or fourth step falls on both kinds alike.
    measured = [_PAIR[::-1] if number.bit_count() % 2 else _PAIR for number in range(pairs)] + [["instrumented"]] * odd
    details = [
        _FIRST_DETAILS,
        _SECOND_DETAILS,
        *((_CLOCKED_STEP, _SAMPLED_STEP)[number % 2] for number in range(2, len(measured))),
    ]
    nothing: list[Kind] = []
    return [kind for both in zip_longest(measured, details, fillvalue=nothing) for kinds in both for kind in kinds]


class Observer(Protocol):
    """Records steps of some kinds in detail; `begin` and `end` are called at the steps' boundaries."""

    kinds: Sequence[Kind]

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def drop(self) -> None:
        """Ends an unusual step and discards its records."""

    def close(self) -> None: ...
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Returns fields of `ProfileFacts`."""


class StepHooks(Protocol):
    """Is notified of each step."""

    def begin(self, kind: Kind) -> Phase:
        """A step begins; returns the first phase of the loop."""

    def observers_ready(self) -> None:
        """All observers of the step have begun."""

    def flags(self) -> list[str]:
        """Returns the events of the step that don't happen in every step."""

    def restart_step(self) -> None:
        """The step begins anew: records of the step so far are discarded."""

    def end(self, *, usual: bool = True) -> None:
        """The step has ended; `usual` says whether all its events happen in most steps."""

    def restart(self) -> None:
        """The script trains in another loop: records of the previous loop are discarded."""

    def between_steps(self) -> None:
        """Called between two steps; the time here counts to neither."""


DELAYED = 3.0
"""A step that takes this many times as long as others was delayed by something that isn't part of every step."""

_TRIMMED_SHARE = 0.25


def middle_mean(values: Collection[float]) -> float:
    """Returns the mean of the middle half.

    Like a median, this mean ignores delayed steps; unlike a median, the mean includes work of every second step.
    """
    cut = int(_TRIMMED_SHARE * len(values))
    return fmean(sorted(values)[cut : len(values) - cut])


_MIN_UPDATES = 3
_MIN_BACKWARDS = 5  # the first update may come after some backwards
_MAX_EVENTS = 1000


@dataclass(frozen=True)
class TrainingEvent:
    """An event that may end a step.

    Attributes:
        what: an optimizer's update, or a backward.
        where: the user's line.
        which: number of the optimizer.
    """

    what: Literal["update", "backward"]
    where: str
    which: int = 0


class Finder:
    """Chooses the event that ends a step: the most frequent event, and of equally frequent events the last.

    An optimizer's update ends a step; without an optimizer, a backward does. Optimizers that are created repeatedly are
    counted by line, once per backward: several of them may step there one after the other.
    """

    def __init__(self) -> None:
        self._counts: Counter[TrainingEvent] = Counter()
        self._at: Counter[TrainingEvent] = Counter()
        self._backwards, self._counted_at = 0, dict[TrainingEvent, int]()

    def record(self, event: TrainingEvent) -> None:
        if len(self._counts) < _MAX_EVENTS:
            self._counts[event] += 1
        self._backwards += event.what == "backward"
        place = TrainingEvent(event.what, event.where, -1)
        if not self._backwards or self._counted_at.get(place) != self._backwards:
            self._at[place] += 1
        self._counted_at[place] = self._backwards

    def anchor(self) -> TrainingEvent | None:
        """Returns the event that ends a step; None while no event is regular. A `which` of -1 matches any optimizer."""
        what = self._anchor_kind()
        least = _MIN_UPDATES if what == "update" else _MIN_BACKWARDS
        return _most_frequent(self._counts, what, least) or _most_frequent(self._at, what, least * 4)

    def guess(self) -> TrainingEvent:
        """Returns the most likely event so far; raises LookupError if no event was recorded."""
        found = _most_frequent(self._counts, self._anchor_kind(), 1)
        if found is None:
            raise LookupError("no event was recorded")
        return found

    def _anchor_kind(self) -> str:
        return "update" if any(event.what == "update" for event in self._counts) else "backward"


class Tally:
    """Counts equal events; `most` is the count of the most frequent event, so optimizers that alternate count once."""

    def __init__(self) -> None:
        self.most = 0
        self._counts: Counter[TrainingEvent] = Counter()

    def record(self, event: TrainingEvent) -> None:
        self._counts[event] += 1
        self.most = max(self.most, self._counts[event])

    def clear(self) -> None:
        if self.most:
            self.most = 0
            self._counts.clear()


def _most_frequent(events: Counter[TrainingEvent], what: str, least: int) -> TrainingEvent | None:
    counts = {event: count for event, count in events.items() if event.what == what}
    most = max(counts.values(), default=0)
    if most < least:
        return None
    return [event for event, count in counts.items() if count >= most - 1][-1]  # in order of first occurrence


def is_end(anchor: TrainingEvent, event: TrainingEvent) -> bool:
    return anchor == event or (anchor.which == -1 and (anchor.what, anchor.where) == (event.what, event.where))


@dataclass
class StepFact:
    """One step.

    Attributes:
        ms: from the end of the previous step to this step's end, without hotloop's work between steps.
        phases: milliseconds; empty if not recorded.
        flags: events that don't happen in every step: `evaluation`, `checkpoint`, `loader 2`, `update 1`.
        apart_ms: milliseconds of each of these events, if begin and end were recorded.
        cpu_ms, system_ms: CPU time of the process; the part of it spent in the system.
        pages: memory pages that the system provided; 0 if the allocator can't be set to retain pages.
        memory: bytes in use by the process or device at the step's end; 0 if not recorded.
        calls: number of network calls; 0 in clean steps.
    """

    kind: Kind
    ms: float = 0.0
    phases: dict[Phase, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    apart_ms: dict[str, float] = field(default_factory=dict)
    cpu_ms: float = 0.0
    system_ms: float = 0.0
    pages: float = 0.0
    memory: int = 0
    calls: int = 0


@dataclass
class ProfileFacts:
    """All recorded facts, without interpretation.

    Attributes:
        torch: whether torch was imported.
        trained: recorded updates and backwards.
        updates: recorded updates of optimizers.
        updates_inside: updates inside a backward, as by parameter hooks; they end no step.
        anchor: the line that ends a step; empty if none was found.
        by_hand: whether the update is written out, without an optimizer.
        awaited: whether an optimizer may step after more backwards than were recorded.
        functional: whether no module was called.
        turned: corrections of phases by line samples: from phase, to phase, fraction.
        one_batch: whether each step trains on the same samples.
        identities: as `Profile.identities`.
        warm_up_s: from the first training event to the first step that counts.
        between_ms: time of unusual events in steps that were skipped between recorded steps.
        modules, operators, lines, functions, loaders, optimizers, habits: records, as dictionaries.
        collections: slow patterns of garbage collection.
        switches: torch's float32 precision switches.
        threads_set_at: the line that sets torch's number of threads; empty if no line does.
        seldom: optimizers that step beside the one that ends a step, each with its step flag.
        children: number of Python processes that the script started.
        compiled: result of `race_compiled`; None if not requested.
        closed: why recording ended; empty while recording.
    """

    torch: bool = False
    trained: int = 0
    updates: int = 0
    updates_inside: int = 0
    anchor: str = ""
    by_hand: bool = False
    awaited: bool = False
    functional: bool = False
    turned: list[tuple[Phase, Phase, float]] = field(default_factory=list)
    between_ms: dict[str, float] = field(default_factory=dict)
    device: str = "cpu"
    batch: list[str] = field(default_factory=list)
    samples_per_step: float | None = None
    one_batch: bool = False
    identities: list[str] = field(default_factory=list)
    warm_up_s: float = 0.0
    compile_s: float = 0.0
    watched_s: float = 0.0
    steps: list[StepFact] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    functions: list[dict[str, Any]] = field(default_factory=list)
    loaders: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    habits: list[dict[str, Any]] = field(default_factory=list)
    collections: list[dict[str, Any]] = field(default_factory=list)
    seldom: list[dict[str, Any]] = field(default_factory=list)
    threads: dict[str, Any] | None = None
    threads_set_at: str = ""
    peak_memory_bytes: int | None = None
    trace: str | None = None
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    children: int = 0
    compiled: dict[str, Any] | None = None
    closed: str = ""

    def set_anchor(self, event: TrainingEvent) -> None:
        """Sets the event that ends a step: a backward, if updates are written out or run inside the backward."""
        self.anchor, self.by_hand = event.where, event.what == "backward" and not self.updates_inside

    def has_usual_flags(self, step: StepFact) -> bool:
        often = Counter(flag for other in self.steps for flag in other.flags)
        return all(2 * often[flag] >= len(self.steps) for flag in step.flags)

    def drop_step(self, step: StepFact) -> None:
        """Restarts the step; the time of its unusual events is added to `between_ms`."""
        for what, ms in step.apart_ms.items():
            self.between_ms[what] = self.between_ms.get(what, 0.0) + ms
        step.flags, step.apart_ms = [], {}

    def record_failure(self, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        self.notes.append(f"recording was ended by an internal error of hotloop: {reason}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ProfileFacts:
        return cls(**{**values, "steps": [StepFact(**step) for step in values["steps"]]})


def mean_phases(steps: Sequence[StepFact]) -> dict[Phase, float]:
    """Returns the milliseconds of each phase: means of the middle half of the steps."""
    names = dict.fromkeys(name for step in steps for name in step.phases)
    return {name: middle_mean([step.phases.get(name, 0.0) for step in steps]) for name in names}
