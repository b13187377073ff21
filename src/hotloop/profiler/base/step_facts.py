"""What was seen while a script or Task was watched: plain values, as they cross from one process to another."""

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
        ms: from the end of the one before to its own end, without what hotloop did in between.
        phases: milliseconds; empty where they weren't watched.
        flags: what happened in it that doesn't in every step: `evaluation`, `checkpoint`, `loader 2`, `update 1`.
        apart_ms: time in it of each of these, as far as it was seen to begin and end.
        cpu_ms, system_ms: CPU time of the process, and of that the time that the system worked for it.
        pages: of memory that the system gave; 0 where the process can't be told to keep them.
        memory: bytes that the process, or the device, holds at its end; 0 where it wasn't watched closely.
        calls: the number of calls of networks; 0 in clean steps.
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
    """All that was seen; what it means is said elsewhere.

    Attributes:
        torch: whether torch was imported.
        trained: updates and backwards that were seen.
        updates: of optimizers alone.
        updates_inside: of optimizers that stepped inside of a backward, as by hooks of parameters; they end no step.
        anchor: the line that ends a step; empty where none was found.
        by_hand: whether the update is written out, without an optimizer.
        awaited: whether an optimizer was there that may step after more backwards than were seen.
        functional: whether no module was called.
        turned: from which phase of the timeline to which one, and what part of it, as the lines say that ran in it.
        one_batch: whether each step trains on the same samples.
        identities: as `Profile.identities`.
        warm_up_s: from the first thing that trains to the first step that counts.
        between_ms: time of what isn't done in every step, in those that went by between the ones that are kept.
        modules, operators, lines, functions, loaders, optimizers, habits: records, dumped.
        collections: habits as well, of garbage.
        switches: torch's, of the format in which products of float32 are computed.
        threads_set_at: the line at which the script says how many threads torch has; empty if it doesn't.
        seldom: optimizers that step beside the one that ends a step, each with the flag of a step that has it.
        children: processes of Python that it started.
        compiled: what a race of the compiled network found, see `race_compiled`; None where none was asked for.
        closed: why watching ended; empty as long as it goes on.
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
        """A step ends there; a backward does where updates are written out, or run inside of it."""
        self.anchor, self.by_hand = event.where, event.what == "backward" and not self.updates_inside

    def has_usual_flags(self, step: StepFact) -> bool:
        """Whether nothing happened in a step but what happens in half of those so far or more."""
        often = Counter(flag for other in self.steps for flag in other.flags)
        return all(2 * often[flag] >= len(self.steps) for flag in step.flags)

    def drop_step(self, step: StepFact) -> None:
        """Keeps of what happened in a step what it took, and has the step begin anew."""
        for what, ms in step.apart_ms.items():
            self.between_ms[what] = self.between_ms.get(what, 0.0) + ms
        step.flags, step.apart_ms = [], {}

    def record_failure(self, error: Exception) -> None:
        """Notes an error of hotloop's own, by which watching ends."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        self.notes.append(f"watching ended by an error of hotloop's own: {said}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ProfileFacts:
        """From what `as_dict` gave."""
        return cls(**{**values, "steps": [StepFact(**step) for step in values["steps"]]})
