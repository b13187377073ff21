"""Watches the steps of a Task in this process: the same watch as a script's, told where a step ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop.core.patches import Patches
from hotloop.core.records.profile import CTRL_C, Profile
from hotloop.core.records.profile_terms import Phase
from hotloop.core.reporter import Report
from hotloop.data.feeds.feed import BatchTransform, Feed
from hotloop.distributed.comm_stats import CommTime
from hotloop.errors import PlanError, TrainingError
from hotloop.lowering.arrays_engine.arrays_step import ArraysStep
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.lowering.steps.compiled_step import CompiledStep
from hotloop.plan import BASELINE, Plan
from hotloop.profiler.array_layers import LayerClock
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import Timeline, clock_for
from hotloop.profiler.base.schedule import Observer
from hotloop.profiler.base.step_facts import ProfileFacts
from hotloop.profiler.hooks.torch_hooks import with_callbacks
from hotloop.profiler.rank_profiles import (
    RankCommPhases,
    agree_on_steps,
    flag_sync_steps,
    hook_rank_calls,
    merge_rank_profiles,
)
from hotloop.profiler.session.observers import LineObserver, ModuleObserver, make_observers
from hotloop.profiler.session.session import ProfilerSession
from hotloop.profiler.summary import summarize
from hotloop.profiler.trace.inductor_kernels import CompilationRecorder
from hotloop.profiler.trace.node_labels import NodeLabels
from hotloop.task import Task
from hotloop.tuning.races.runner import Runner

_MAX_S = 300.0
"""Of watching, whatever was seen by then, unless so many steps were asked for."""


def profile_task(
    task: Task,
    plan: Plan = BASELINE,
    *,
    steps: int | None = None,
    trace: Path | None = None,
    source: str = "",
    say: Report = lambda line: None,
    keeps: bool = False,
) -> Profile:
    """Trains a while under a plan, and says where the time of a step goes; nothing of the training is kept.

    Under a plan for ranks each of them calls it, and gets its own profile with what all saw.

    Args:
        steps: how many are measured; None for 60, fewer if these would take over 30 s.
        trace: a file for the Chrome trace of a few steps.
        source: what the Task is called in the profile; its name if empty.
        say: is told what the user should know of the lowering.
        keeps: whether Ctrl-C ends the measuring alone, once there are some steps, where one process trains.

    Raises:
        HotloopError: the Task can't be run under the plan.
        PlanError: a trace under a plan that runs nothing that torch's profiler sees.
    """
    if trace is not None and plan.engine == "arrays":
        raise PlanError(
            "a trace under engine=arrays, which runs none of the operations that torch's profiler sees",
            expected="engine=eager",
            fix="leave out the trace",
        )
    with _record_compilations(plan) as compilations:
        program = lower(task, plan, say)
        try:
            return _profile(program, compilations, steps, trace, source or task.name, keeps=keeps)
        finally:
            program.close()


def profile_program(
    program: Program, *, steps: int | None = None, trace: Path | None = None, source: str = ""
) -> Profile:
    """The same of a Program, which has its State from before afterwards; what it compiled before is one whole."""
    return _profile(program, CompilationRecorder(), steps, trace, source)


@contextmanager
def _record_compilations(plan: Plan) -> Iterator[CompilationRecorder]:
    """What is compiled inside is noted, kernel by kernel; a package is made elsewhere, and shows nothing of its inside."""
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
    watch = ProfilerSession(
        agree_on_steps(steps, step_s, world),
        CallSites(),
        lambda facts: None,
        lambda watch: _observers(watch, program, trace),
        found=False,
        in_step=not world.is_single,
        compilations=compilations,
    )
    watch.facts.device = watch.timeline.device = str(program.device)
    watch.timeline.clock = clock_for(program.device)
    watch.install()
    try:
        with _hook_program(program, watch):
            spent = _run(runner, watch, _MAX_S if steps is None else math.inf)
    except KeyboardInterrupt:
        if not (keeps and world.is_single):
            raise
        stopped = CTRL_C
    finally:
        watch.close("enough steps were seen")
        watch.remove()
        runner.restore_state()
    facts = _with_notes(watch.facts, program, known=compilations.model is not None)
    facts.switches = dict(program.parts.switches)
    measured = [] if world.is_single else flag_sync_steps(facts, spent, relayed=program.parts.is_pipelined)
    plan = program.parts.plan
    profile = summarize(facts, source, plan=plan.brief())
    if stopped and profile.step_ms is None:
        raise KeyboardInterrupt  # there is nothing to keep
    roles = program.parts.splits
    known = {
        "samples_per_step": roles.batch_size,
        "one_batch": roles.batches == 1,
        "engine": plan.engine,
        "stopped": stopped,
    }
    profile = profile.model_copy(update={"seconds": time.monotonic() - began, **known})
    return profile if world.is_single else merge_rank_profiles(profile, measured, program.parts)


def _observers(watch: ProfilerSession, program: Program, trace: Path | None) -> list[Observer]:
    if isinstance(program._step, ArraysStep):  # none of torch's operators are called
        return [LineObserver(watch), LayerClock(watch, program._step)]
    if program.parts.world.is_single:
        return make_observers(watch, trace)
    found = make_observers(watch, trace, program.model)
    program.parts.meter.ear = RankCommPhases(watch, next(one.clock for one in found if isinstance(one, ModuleObserver)))
    return found


def _run(runner: Runner, watch: ProfilerSession, longest_s: float) -> list[CommTime]:
    """Runs the steps; returns what each of them cost this rank for the others, of whom none stops before all do."""
    program, until = runner.program, time.monotonic() + longest_s
    alone, spent = program.parts.world.is_single, []
    program.take_spent()
    watch.boundary()
    while not watch.closed and not (alone and time.monotonic() > until):
        runner.window(1)
        spent.append(program.take_spent())
        watch.boundary()
    if not alone and not watch.facts.closed:
        raise TrainingError(f"{watch.facts.notes[-1]}", fix="report it as a bug, with the Task")
    return spent


def _with_notes(facts: ProfileFacts, program: Program, *, known: bool) -> ProfileFacts:
    if isinstance(program._step, CompiledStep):
        inside = "has no phases and modules of its own"
        if known:
            inside = "is split by its kernels, and these by their arithmetic"
        facts.notes.append(f"the step runs as one compiled program, whose inside {inside}")
        facts.notes.append(
            "each step is looked at before it runs, and added up after; training mostly does that once for many steps"
        )
    if isinstance(program._step, ArraysStep):
        facts.notes.append(
            "layers are written out in array operations: each is timed, and nothing looks inside of them"
        )
    return facts


@contextmanager
def _hook_program(program: Program, watch: ProfilerSession) -> Iterator[None]:
    """Tells the timeline of what hotloop itself does in a step: it feeds, treats batches, and calls what is compiled."""
    feed, patches, timeline = program.feed, Patches(), watch.timeline
    program.feed = _TimedFeed(feed, timeline)
    patches.patch(BatchTransform, "__call__", _phase_wrapper(watch, "batch"))
    for name in ("_runner", "_replay"):
        if callable(getattr(program._step, name, None)):
            patches.patch(program._step, name, _phase_wrapper(watch, "unattributed"))
    if isinstance(program._step, ArraysStep):
        _hook_arrays_step(watch, program._step, patches)
    if not program.parts.world.is_single:
        hook_rank_calls(watch, patches)
    try:
        yield
    finally:
        patches.undo()
        program.feed = feed
        program.parts.meter.ear = None


_ARRAYS_PHASES: dict[str, Phase] = {
    "_clear_gradients": "update",
    "_arrays": "batch",
    "_compare_first": "loss",
    "_clip_unscaled": "update",
    "_update": "update",
    "step_schedule": "update",
    "update_average": "update",
}
"""Of the methods of a step that is written out."""


def _hook_arrays_step(watch: ProfilerSession, step: ArraysStep, patches: Patches) -> None:
    for name, phase in _ARRAYS_PHASES.items():
        patches.patch(step, name, _phase_wrapper(watch, phase))
    patches.patch(step.network.graph, "forward", _phase_wrapper(watch, "forward"))
    patches.patch(step.network.graph, "backward", _phase_wrapper(watch, "backward"))
    computing = with_callbacks(
        watch.is_training_thread, lambda args, kwargs: watch.array_step_began(args[0]), lambda *ended: None
    )
    patches.patch(step, "_arrays", computing)


def _phase_wrapper(watch: ProfilerSession, phase: Phase) -> Callable[[Any], Any]:
    timeline = watch.timeline
    return with_callbacks(
        watch.is_training_thread,
        lambda args, kwargs: timeline.enter(phase),
        lambda token, args, kwargs, result, done: timeline.leave(),
    )


class _TimedFeed:
    """A feed that says when a batch is waited for."""

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
