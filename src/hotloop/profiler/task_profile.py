"""Profiles the steps of a Task in this process or on each rank, by a session whose steps are known.

Ranks take the same steps; rank 0's profile has the times of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from hotloop.core.format import format_milliseconds
from hotloop.core.patches import Patches
from hotloop.core.records.profile import CTRL_C, Profile, RankTime
from hotloop.core.records.profile_terms import Phase
from hotloop.core.reporter import Say
from hotloop.data.feeds.feed import BatchTransform, Feed
from hotloop.distributed.comm_stats import CommTime
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.ddp import ParameterHost
from hotloop.errors import TrainingError
from hotloop.lowering.build import lower
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.program import Program
from hotloop.lowering.steps.compiled_step import CompiledStep
from hotloop.lowering.steps.local_sgd import SYNC_EVERY, WeightAverage
from hotloop.plan import BASELINE, Plan
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import RANK_PHASES, Timeline, clock_for
from hotloop.profiler.base.steps import DEFAULT_STEPS, Observer, ProfileFacts
from hotloop.profiler.hooks.torch_hooks import wrap_in_phase, wrap_rank_call
from hotloop.profiler.session import ProfilerSession, make_observers
from hotloop.profiler.step_sequence import ENOUGH_STEPS, LONGEST_S
from hotloop.profiler.summary import summarize
from hotloop.profiler.timers.modules import ClockOwner, ModuleClock
from hotloop.profiler.trace.inductor_kernels import CompilationRecorder, NodeLabels
from hotloop.task import Task
from hotloop.tuning.races.runner import Runner

_MAX_S = 300.0
"""Longest recording in seconds, if no number of steps is given."""


def record_task(
    task: Task,
    plan: Plan = BASELINE,
    *,
    steps: int | None = None,
    trace: Path | None = None,
    source: str = "",
    say: Say = lambda line: None,
    keeps: bool = False,
) -> Profile:
    """Trains for a while under a plan, and profiles the steps; the training's state is discarded.

    Under a plan for ranks each rank calls this, and gets its own profile with the times of all ranks.

    Args:
        steps: number of measured steps; None for 60, fewer if these would take over 30 s.
        trace: a file for the Chrome trace of a few steps.
        source: the profile's name of the Task; default the Task's name.
        say: receives lines about the lowering for the user.
        keeps: whether Ctrl-C ends only the recording, once steps are measured, in one process.

    Raises:
        HotloopError: the Task can't run under the plan.
    """
    with _record_compilations(plan) as compilations:
        program = lower(task, plan, say)
        try:
            return _profile(program, compilations, steps, trace, source or task.name, keeps=keeps)
        finally:
            program.close()


def record_program(
    program: Program, *, steps: int | None = None, trace: Path | None = None, source: str = ""
) -> Profile:
    """Profiles a Program, and restores its State; code compiled before is one unit."""
    return _profile(program, CompilationRecorder(), steps, trace, source)


@contextmanager
def _record_compilations(plan: Plan) -> Iterator[CompilationRecorder]:
    """Records compilations, kernel by kernel; a package is compiled elsewhere, and shows no kernels."""
    compilations = CompilationRecorder()
    if plan.compile not in ("forward", "step"):
        yield compilations
        return
    import torch._inductor.compile_fx  # noqa: F401

    compilations.install()
    try:
        with NodeLabels().on():
            yield compilations
    finally:
        compilations.remove()


def _profile(
    program: Program,
    compilations: CompilationRecorder,
    steps: int | None,
    trace: Path | None,
    source: str,
    *,
    keeps: bool = False,
) -> Profile:
    runner, world, spent, stopped = Runner(program), program.parts.world, list[CommTime](), ""
    _, step_s = runner.warm_up()
    compilations.model = program.parts.model if compilations.graphs else None
    began = time.monotonic()
    session = ProfilerSession(
        agree_on_steps(steps, step_s, world),
        CallSites(),
        lambda facts: None,
        lambda session: _observers(session, program, trace),
        found=False,
        in_step=not world.is_single,
        compilations=compilations,
    )
    session.facts.device = session.timeline.device = str(program.device)
    session.timeline.clock = clock_for(program.device)
    session.install()
    try:
        with _hook_program(program, session):
            spent = _run(runner, session, _MAX_S if steps is None else math.inf)
    except KeyboardInterrupt:
        if not (keeps and world.is_single):
            raise
        stopped = CTRL_C
    finally:
        session.close("enough steps were recorded")
        session.remove()
        runner.restore_state()
    facts = _with_notes(session.facts, program, known=compilations.model is not None)
    facts.switches = dict(program.parts.switches)
    measured = [] if world.is_single else flag_sync_steps(facts, spent, relayed=program.parts.is_pipelined)
    plan = program.parts.plan
    profile = summarize(facts, source, plan=plan.brief())
    if stopped and profile.step_ms is None:
        raise KeyboardInterrupt  # nothing was measured
    splits = program.parts.splits
    update: dict[str, Any] = {"stopped": stopped, "seconds": time.monotonic() - began}
    update |= {"samples_per_step": splits.batch_size, "one_batch": splits.batches == 1}
    profile = profile.model_copy(update=update)
    return profile if world.is_single else merge_rank_profiles(profile, measured, program.parts)


def _observers(session: ProfilerSession, program: Program, trace: Path | None) -> list[Observer]:
    if program.parts.world.is_single:
        return make_observers(session, trace)
    observers = make_observers(session, trace, program.model)
    clock = next(observer for observer in observers if isinstance(observer, ModuleClock))
    program.parts.meter.ear = RankCommPhases(session, clock)
    return observers


def _run(runner: Runner, session: ProfilerSession, longest_s: float) -> list[CommTime]:
    """Runs the steps; returns this rank's communication in each. No rank stops before all do."""
    program, until = runner.program, time.monotonic() + longest_s
    alone, spent = program.parts.world.is_single, []
    program.take_spent()
    session.boundary()
    while not session.closed and not (alone and time.monotonic() > until):
        runner.window(1)
        spent.append(program.take_spent())
        session.boundary()
    if not alone and not session.facts.closed:
        raise TrainingError(f"{session.facts.notes[-1]}", fix="report it as a bug, with the Task")
    return spent


def _with_notes(facts: ProfileFacts, program: Program, *, known: bool) -> ProfileFacts:
    if isinstance(program._step, CompiledStep):
        parts = "its time is split by kernels" if known else "it has no phases and modules"
        facts.notes.append(f"the step runs as one compiled program: {parts}")
        facts.notes.append("each step includes checks and sums that training does once for many steps")
    return facts


@contextmanager
def _hook_program(program: Program, session: ProfilerSession) -> Iterator[None]:
    feed, patches, timeline = program.feed, Patches(), session.timeline
    program.feed = _TimedFeed(feed, timeline)
    patches.patch(BatchTransform, "__call__", _phase_wrapper(session, "batch"))
    for name in ("_runner", "_replay"):
        if callable(getattr(program._step, name, None)):
            patches.patch(program._step, name, _phase_wrapper(session, "unattributed"))
    if not program.parts.world.is_single:
        hook_rank_calls(session, patches)
    try:
        yield
    finally:
        patches.undo()
        program.feed = feed
        program.parts.meter.ear = None


def _phase_wrapper(session: ProfilerSession, phase: Phase) -> Callable[[Any], Any]:
    return wrap_in_phase(session.is_training_thread, session.timeline, phase)


class _TimedFeed:
    """A feed that sets the data phase while a batch is awaited."""

    def __init__(self, feed: Feed, timeline: Timeline) -> None:
        self._feed, self._timeline = feed, timeline
        self.batches, self.reseeds = feed.batches, feed.reseeds

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        self._timeline.enter("data")
        batches = self._feed.epoch(epoch, start)
        while True:
            try:
                batch = next(batches, None)
            finally:
                self._timeline.leave()
            if batch is None:
                return
            self._timeline.turn("python")
            yield batch
            self._timeline.enter("data")

    def close(self) -> None:
        self._feed.close()


class RankCommPhases:
    """Listens to a rank's communication meter: sets timeline phases, and pauses the module clock.

    Communication in other threads overlaps with the training thread, and is ignored.
    """

    def __init__(self, session: ProfilerSession, clock: ModuleClock) -> None:
        self._session, self._clock = session, clock
        self._before: list[ClockOwner | None] = []

    def enter(self, phase: Phase) -> None:
        if self._session.is_training_thread():
            current = self._session.timeline.current
            self._session.timeline.enter(current if current in RANK_PHASES else phase)
            self._before.append(self._clock.pause())

    def leave(self) -> None:
        if self._session.is_training_thread():
            self._session.timeline.leave()
            self._clock.resume(self._before.pop())

    def turn(self, phase: Phase) -> None:
        if self._session.is_training_thread():
            self._session.timeline.turn(phase)
            self._clock.pause()


_SENDING_METHODS = ((ParameterHost, "collect"), (ParameterHost, "broadcast"), (WeightAverage, "take"))


def hook_rank_calls(session: ProfilerSession, patches: Patches) -> None:
    """Adds communication phases to the timeline; the meter reports waiting."""
    wrap = wrap_rank_call(session.is_training_thread, session.timeline, "communication")
    for owner, name in _SENDING_METHODS:
        patches.patch(owner, name, wrap)


def agree_on_steps(steps: int | None, step_s: float, world: World) -> int | None:
    """Returns the number of steps to measure; ranks measure as many as rank 0 has time for, since all end together."""
    if world.is_single or steps is not None:
        return steps
    return world.broadcast_int(min(DEFAULT_STEPS, max(ENOUGH_STEPS, int(LONGEST_S / step_s))))


def flag_sync_steps(facts: ProfileFacts, spent: Sequence[CommTime], *, relayed: bool) -> list[CommTime]:
    """Flags the steps in which ranks communicated, for plans that don't communicate in each step.

    Args:
        spent: this rank's communication in each step.
        relayed: whether ranks pass microbatches along.

    Returns:
        The communication in the measured steps.
    """
    measured = []
    for step in facts.steps if relayed else ():  # no loss is computed between microbatches
        step.phases["python"] = step.phases.get("python", 0.0) + step.phases.pop("loss", 0.0)
    for step, own in zip(facts.steps, spent, strict=True):
        if own.communicated_s:
            step.flags.append("meeting")
        if step.kind in ("clean", "instrumented"):
            measured.append(own)
    return measured


_WRAPPER_PREFIXES = ("DistributedDataParallel.", "FSDP::", "gloo:")
"""Prefixes of profiler events that enclose operators, or run in other threads."""


def merge_rank_profiles(own: Profile, spent: Sequence[CommTime], parts: LoweringContext) -> Profile:
    """Returns a rank's profile with the times of all ranks, which all call this; `spent` has the measured steps."""
    mine = RankTime(
        step_ms=own.step_ms,
        phases=own.phases,
        waiting_ms=1e3 * fmean(one.waited_s for one in spent),
        communication_ms=1e3 * fmean(one.communicated_s for one in spent),
    )
    ranks = parts.world.all_gather(mine)
    for name in ("waiting_ms", "communication_ms"):
        if not any(getattr(one, name) for one in ranks):  # waiting and communication can't be separated
            ranks = [one.model_copy(update={name: None}) for one in ranks]
    operators = [one for one in own.operators if not one.name.startswith(_WRAPPER_PREFIXES)]
    update = {
        "ranks": ranks,
        "slowest": _slowest_rank(ranks),
        "operators": [one.model_copy(update={"module": ""}) for one in operators] if parts.is_pipelined else operators,
        "modules": [] if parts.is_pipelined else own.modules,
        "notes": [*own.notes, *_notes(parts, ranks)],
    }
    return own.model_copy(update=update)


def _notes(parts: LoweringContext, ranks: Sequence[RankTime]) -> Iterator[str]:
    if parts.is_pipelined:
        yield "stages run as exported graphs without separate modules; the operators are those of rank 0"
    every = parts.plan.sync_every or SYNC_EVERY
    if parts.plan.parallel == "local" and every > 1:
        spent = (
            f"rank {rank} {_format_ms(one.waiting_ms)} and {_format_ms(one.communication_ms)}"
            for rank, one in enumerate(ranks)
        )
        yield (
            f"the ranks average their weights every {every} steps; the phases are those of a step without averaging."
            f" Waiting and communication per step, averaged over all steps: {', '.join(spent)}"
        )


def _format_ms(value: float | None) -> str:
    return format_milliseconds(value or 0.0)


def _slowest_rank(ranks: Sequence[RankTime]) -> int | None:
    spent = [one.phases.get("waiting", 0.0) + one.phases.get("communication", 0.0) for one in ranks]
    return min(range(len(ranks)), key=spent.__getitem__) if any(spent) else None
