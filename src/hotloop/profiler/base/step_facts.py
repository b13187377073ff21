"""The recorded facts of a script or Task: plain values that are passed between processes."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.schedule import Kind
from hotloop.profiler.base.step_detection import TrainingEvent


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
