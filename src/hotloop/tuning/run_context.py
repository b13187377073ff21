"""The request of one run as one value, from the front door to lowering."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotloop.core.callback import Callback, has_user_callbacks
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Verdict
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import SILENT, Reporter
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.program import Program
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask


@dataclass(frozen=True)
class RunContext:
    """A Task, and how to run it.

    Attributes:
        loaded: the Task; None for a run whose folder has the source.
        plan: a plan, a TOML file or a name; `axes` are set on top.
        overrides: fields of the Task to change.
        stop_after: a time such as `11h`, after which training stops.
        checkpoint_every: `auto`, a number of steps or a time; None for the run's own.
        rank_timeout: see `join_ranks`.
        rehearse: `auto`, `no`, or the number of rehearsals of the resume.
        trust: run the code in the folder of a run that somebody else started.
        callbacks: of the run, beside the Task's.
        wanted: what `plan` and `axes` mean.
        until: when the run stops, in seconds by `time.monotonic()`.
        done: steps of the run before this start.
        pause_after_epoch: stop cleanly at the end of this epoch, from 1.
        plan_searches: results of races and proofs that chose the plan, in order; the search of a plan adds to the list.
        has_reports: draw the learning curves and write TensorBoard's files when training stops.
        program: a Program that is lowered already, in place of one by the plan.
        is_live: `auto` searches while the run trains, where that is possible.
        candidates: plans for the search while the run trains; the choice of the first plan adds to the list.
        replay: a run whose plans this run uses at the same steps.
        facts: of the Task with the fingerprint of stored results, for all steps of the run; None where not computed yet.
        parts: the model and the data that the facts were computed from; the first lowering takes them from the list.
    """

    loaded: LoadedTask | None = None
    plan: Plan | str | Path | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    stop_after: str | None = None
    checkpoint_every: str | None = None
    rank_timeout: str | None = None
    rehearse: str = "no"
    trust: bool = False
    callbacks: Sequence[Callback] = ()
    reporter: Reporter = SILENT
    wanted: PlanRequest = field(default_factory=lambda: PlanRequest(BASELINE))
    until: float = math.inf
    is_resumed: bool = False
    done: int = 0
    facts: TaskFacts | None = None
    pause_after_epoch: float = math.inf
    has_reports: bool = True
    plan_searches: list[Verdict] = field(default_factory=list)
    program: Program | None = None
    is_live: bool = False
    replay: Path | None = None
    candidates: list[Plan] = field(default_factory=list)
    parts: list[LoweringContext] = field(default_factory=list)

    @property
    def source(self) -> LoadedTask:
        assert self.loaded is not None
        return self.loaded

    @property
    def task(self) -> Task:
        return self.source.task

    @property
    def has_user_callbacks(self) -> bool:
        return has_user_callbacks([*self.task.callbacks, *self.callbacks])

    def store_plan_search(self, run: Path) -> None:
        """Writes the last search that raced a plan as `<run>/plan_search.json`."""
        if raced := [found for found in self.plan_searches if len(found.plans) > 1]:
            write_atomic(run / "plan_search.json", raced[-1].model_dump_json(indent=2))

    def say(self, line: str) -> None:
        self.reporter.say(line)

    def on_rank(self, is_rank_zero: bool) -> RunContext:
        """Returns the context of a rank: only the first rank reports and calls callbacks."""
        return self if is_rank_zero else replace(self, callbacks=(), reporter=SILENT)

    def with_overrides(self) -> RunContext:
        """Returns the context with the overrides in its Task."""
        return replace(self, loaded=replace(self.source, task=override_fields(self.task, self.overrides)))
