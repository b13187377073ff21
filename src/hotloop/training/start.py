"""Starting a training and going on with one: from what was asked for to a run and how it ended."""

from __future__ import annotations

import copy
import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hotloop.core.callback import Callback, has_user_callbacks
from hotloop.core.files.trust import require_trust
from hotloop.core.files.trust import store_trust as trust_run
from hotloop.core.float32_switches import apply_switches, read_switches
from hotloop.core.format import parse_seconds
from hotloop.core.hardware import machine
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.versions import result_versions
from hotloop.core.number_formats import other_settings
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.training import RunRecord
from hotloop.core.reporter import ProgressReporter, Report
from hotloop.data.batch_tree import batch_inputs
from hotloop.data.feeds.feed import first_batch
from hotloop.distributed.join import join_ranks
from hotloop.distributed.launch import local_rank_count
from hotloop.distributed.process_group import RankSession
from hotloop.errors import DiskError, HotloopError, RunError, TaskError
from hotloop.lowering.build import close_on_error, lower
from hotloop.lowering.parameter_server.workers.worker import RemoteTask
from hotloop.lowering.parameter_server.workers.worker_start import single_worker_plan, start_workers
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import task_facts
from hotloop.lowering.transforms.cudnn import cudnn_inexact_reasons
from hotloop.plan import Plan
from hotloop.report.learning_curves import draw_curves
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask, files_of, load_from_run
from hotloop.training import tensorboard
from hotloop.training.cadence import CheckpointCadence
from hotloop.training.early_stopping import EarlyStopping, RunOutcome
from hotloop.training.loop import train_loop
from hotloop.training.resume import check_overrides
from hotloop.training.run import FollowerRun, Run, is_run
from hotloop.tuning.auto.recall import count_trained_steps, facts_for_step_count, lower_cached_or_auto


def start_run(
    loaded: LoadedTask,
    *,
    run: Path | None = None,
    plan: Plan | str | Path | None = None,
    axes: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stop_after: str | None = None,
    checkpoint_every: str = "auto",
    callbacks: Sequence[Callback] = (),
    say: Report = lambda line: None,
    during: ProgressReporter | None = None,
    began: float | None = None,
    rank_timeout: str | None = None,
) -> tuple[Run, RunOutcome]:
    """Starts a new run of a loaded Task; `axes` are set on top of the plan, and see `lower` for `during`.

    As one of several ranks that were killed before and are started again, it goes on with their run.

    Args:
        began: from when on `stop_after` counts, by `time.monotonic()`; default now.
        rank_timeout: see `join_ranks`.
    """
    began = time.monotonic() if began is None else began
    wanted = PlanRequest.with_auto_default(plan, axes)
    with join_ranks(wanted.plan, say, wanted.plan.ranks, rank_timeout) as ranks:
        options: dict[str, Any] = dict(overrides=overrides, stop_after=stop_after, checkpoint_every=checkpoint_every)
        if ranks.world.is_rank_zero:
            options |= dict(callbacks=callbacks, say=say, during=during)
        begun = ranks.begun() or (run if run is not None and ranks.cut_short_at(run) is not None else None)
        if run is None and ranks.without_history:
            raise RunError(
                "the run has no name, and torchrun has no store that outlives its ranks",
                expected="a name, by which ranks that are started again find it",
                fix="give --run (or run=), or unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            )
        if begun is not None:
            run = Path(begun)
            if ranks.world.broadcast_object(partial(is_run, run)):  # else a rank was killed before the run's first step
                return _resume_in_rank(run, loaded, wanted, ranks, **options)
        return _start_in_rank(loaded, run, wanted, ranks, began, **options)


def _start_in_rank(
    loaded: LoadedTask,
    run: Path | None,
    wanted: PlanRequest,
    ranks: RankSession,
    began: float,
    overrides: Mapping[str, Any] | None,
    stop_after: str | None,
    checkpoint_every: str,
    callbacks: Sequence[Callback] = (),
    say: Report = lambda line: None,
    during: ProgressReporter | None = None,
) -> tuple[Run, RunOutcome]:
    task = override_fields(loaded.task, overrides)
    until = began + check_options(task, stop_after, checkpoint_every)
    path = ranks.world.broadcast_object(lambda: _new_folder(run, task.name))
    facts = facts_for_step_count(loaded, task, wanted)
    program = lower_cached_or_auto(loaded, task, wanted, say, during, facts, until=until, callbacks=callbacks)
    as_given = replace(program.parts, task=task, splits=task.roles)  # facts are of the Task, not of how it is run
    record = RunRecord(
        id=uuid.uuid4().hex,
        name=task.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        source=loaded.record,
        overrides=dict(overrides or {}),
        facts=task_facts(as_given, loaded.record.digest if loaded.record else ""),
        classes=list(task.classes or task.roles.classes),
        note=task.roles.note,
        checkpoint_every=checkpoint_every,
        switches=read_switches(),
        versions=result_versions(),
    )
    made = (path, record, program.parts.plan)
    ranks.begin(str(path.absolute()))  # before the run exists, so that ranks that are started again find the run
    with close_on_error(program):
        handle = Run.create(*made, loaded.files) if ranks.world.is_rank_zero else FollowerRun(*made)
    if ranks.world.is_rank_zero and record.source is not None:
        for note in trust_run(record, path):
            say(note)
    if task.roles.note:
        say(task.roles.note)
    for reason in record.facts.inexact:
        say(reason)
    noting = partial(count_trained_steps, facts, wanted, say=say)
    return handle, _train(handle, task, lambda: program, noting, False, until, ranks.limit_s, callbacks, say)


def check_options(task: Task, stop_after: str | None, checkpoint_every: str) -> float:
    """Seconds that a new run of a Task has; what is wrong with these options shows before an hour of it.

    Raises:
        PlanError: one of the two texts is no time.
        TaskError: the Task is to be watched by data that it doesn't have.
    """
    CheckpointCadence.parse(checkpoint_every)
    limit_s = math.inf if stop_after is None else parse_seconds(stop_after, "stop-after")
    EarlyStopping.of(task.monitor, task.goal, task.roles.validation is not None)
    return limit_s


def resume_run(
    path: Path,
    *,
    task: Task | None = None,
    plan: Plan | str | Path | None = None,
    axes: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stop_after: str | None = None,
    checkpoint_every: str | None = None,
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
    say: Report = lambda line: None,
    during: ProgressReporter | None = None,
    rank_timeout: str | None = None,
) -> tuple[Run, RunOutcome]:
    """Goes on with a run where it was stopped or killed; under another plan from here on, if there is one."""
    own = Run.open(path).plan if plan is None else None
    wanted = PlanRequest.from_value(plan if own is None else _feasible_own_plan(own, axes), axes)
    named = wanted.plan.ranks if plan is not None or "ranks" in (axes or {}) else None
    with join_ranks(wanted.plan, say, named, rank_timeout) as ranks:
        options: dict[str, Any] = dict(overrides=overrides, stop_after=stop_after, checkpoint_every=checkpoint_every)
        if ranks.world.is_rank_zero:
            options |= dict(callbacks=callbacks, say=say, during=during)
            if own is not None and wanted.plan.allocator != own.allocator and "allocator" not in (axes or {}):
                say("memory of steps isn't kept from here on: nobody here can be told to; the result has the same bits")
        return _resume_in_rank(
            path, None if task is None else LoadedTask(task, None, {}), wanted, ranks, trust=trust, **options
        )


def _feasible_own_plan(own: Plan, axes: Mapping[str, Any] | None) -> Plan:
    """A run's own plan; memory that the rules had it keep is not kept where nobody can be told to, with the same bits.

    The names of the stages are for the run's number of ranks; `PlanRequest.with_split` restores them for this number.
    """
    own = own if "split" in (axes or {}) else own.with_axes(split="auto")
    asked = "allocator" in (axes or {}) or machine.active_allocator() is not None
    return own if asked else own.with_axes(allocator="default")


def _resume_in_rank(
    path: Path,
    loaded: LoadedTask | None,
    wanted: PlanRequest,
    ranks: RankSession,
    overrides: Mapping[str, Any] | None,
    stop_after: str | None,
    checkpoint_every: str | None,
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
    say: Report = lambda line: None,
    during: ProgressReporter | None = None,
) -> tuple[Run, RunOutcome]:
    handle = Run.open(path) if ranks.world.is_rank_zero else FollowerRun.open(path)
    for damage in handle.damages() if ranks.world.is_rank_zero else ():
        say(damage)
    passed_s = ranks.begin(str(path.absolute()), ranks.cut_short_at(path, theirs=True))
    wanted = wanted.with_split(handle.plan, ranks.world.ranks)
    if checkpoint_every is not None:
        CheckpointCadence.parse(checkpoint_every)
        handle.record = handle.record.model_copy(update={"checkpoint_every": checkpoint_every})
    began = time.monotonic() - passed_s
    until = math.inf if stop_after is None else began + parse_seconds(stop_after, "stop-after")
    before = task_of_run(handle, None if loaded is None else loaded.task, trust=trust, say=say)
    check_overrides(handle.record.facts, before, overrides or {})
    handle.record = handle.record.model_copy(update={"overrides": {**handle.record.overrides, **(overrides or {})}})
    task = override_fields(before, overrides)
    if (final := handle.final) is not None and len(handle.epochs) >= _last_epoch(handle, task, final):
        say(f"{path} is finished already; --epochs with a larger number goes on with it")
        return handle, RunOutcome("finished", True, [], final)
    if task.schedule is not None and task.epochs != before.epochs:
        say(f"the learning-rate schedule was laid out for {before.epochs} epochs: look at what it does after them")
    then = handle.record.versions
    if other := [
        f"{name} {then[name]} then, {now} now" for name, now in result_versions().items() if then.get(name, now) != now
    ]:
        say(f"{', '.join(other)}: the result may differ in its last bits")
    for reason in handle.record.facts.inexact:
        say(reason)
    done = handle.epochs[-1]["step"] if handle.epochs else 0
    loaded = loaded or LoadedTask(before, handle.record.source, files_of(handle.source))
    with _restore_switches(handle, wanted, say):
        facts = facts_for_step_count(loaded, task, wanted)
        lowered = partial(lower_cached_or_auto, loaded, task, wanted, say, during, facts)
        first = partial(lowered, done=done, until=until, callbacks=callbacks)
        noting = partial(count_trained_steps, facts, wanted, say=say)
        return handle, _train(handle, task, first, noting, True, until, ranks.limit_s, callbacks, say)


@contextmanager
def _restore_switches(handle: Run, wanted: PlanRequest, say: Report) -> Iterator[None]:
    """Has torch's switches as they were when the run began, for its steps and for its evaluations."""
    now, device = read_switches(), resolve_device(wanted.plan).device.partition(":")[0]
    then = now | handle.record.switches
    handle.record = handle.record.model_copy(update={"switches": then})
    if line := other_settings(then, now, device):
        say(line)
    with apply_switches(then, device):
        yield


def _last_epoch(handle: Run, task: Task, final: dict[str, Any]) -> int:
    """The epoch at which the run is over: an early stop counts as the end."""
    return task.epochs if final["reason"] == "finished" else len(handle.epochs)


def _train(
    handle: Run,
    task: Task,
    first: Callable[[], Program],
    noting: Callable[[int], None],
    resume: bool,
    until: float,
    limit_s: float | None,
    callbacks: Sequence[Callback],
    say: Report,
) -> RunOutcome:
    """Trains in the run's folder, beginning with the Program that `first` makes; stops at `until`, by `time.monotonic()`.

    Args:
        noting: is told of the steps done, for runs to come.
        limit_s: how long a server waits for its workers, see `start_workers`.
    """
    handle.lock()
    before, events, reached = handle.as_written(), len(handle.journal()), handle.reached()
    try:
        program = first()
        plan = program.parts.plan
        ready = [_with_workers(program, handle, task, limit_s, say)]

        def relower() -> Program:
            return ready.pop() if ready else lower(task, single_worker_plan(plan) if plan.parallel == "async" else plan)

        changed = {name: getattr(handle.record, name) for name in ("overrides", "checkpoint_every", "switches")}
        handle.keep(plan=plan, record=before.record.model_copy(update=changed))
        handle.task = task
        if has_user_callbacks([*task.callbacks, *callbacks]) and not task.built_last(program.model):
            say(
                "the model factory has made other models since the one that is trained: a callback must not change the last"
            )
        for reason in cudnn_inexact_reasons(program.parts):
            if handle.note_inexact(reason):
                events += 1
                say(reason)
        return train_loop(
            relower,
            handle,
            resume=resume,
            stop_after_s=None if math.isinf(until) else until - time.monotonic(),
            callbacks=() if isinstance(handle, FollowerRun) else [*_default_callbacks(task, program, say), *callbacks],
            say=say,
        )
    except (HotloopError, KeyboardInterrupt) as error:
        if isinstance(error, DiskError) and handle.checkpoints.files():
            error = DiskError(
                error.given,
                expected=error.expected,
                fix=f"{error.fix}, then go on from the last good checkpoint with --resume {handle.path}",
            )
        if not resume:
            handle.discard()
        elif len(handle.journal()) == events:  # what couldn't even begin leaves the run as it was
            handle.keep(plan=before.plan, record=before.record)
        raise error
    finally:
        handle.unlock()
        if not isinstance(handle, FollowerRun):
            noting(handle.reached() - reached)


def _with_workers(program: Program, handle: Run, task: Task, limit_s: float | None, say: Report) -> Program:
    """The Program with workers that train the run's Task, if its plan is asynchronous."""
    plan, record = program.parts.plan, handle.record
    if plan.parallel != "async":
        return program
    recipe = RemoteTask.from_task(task, handle.source, record.source, record.overrides)
    return start_workers(program, recipe, local_rank_count(plan), say, limit_s)


def _default_callbacks(task: Task, program: Program, say: Report) -> list[Callback]:
    """The Task's own callbacks, and the pictures."""
    return [*task.callbacks, draw_curves, *_tensorboard_callbacks(task, program, say)]


def _tensorboard_callbacks(task: Task, program: Program, say: Report) -> list[Callback]:
    """A writer for TensorBoard, if it is installed; the graph is drawn for models that take a batch's inputs.

    The graph is that of a copy: a callback of the user's may know the model that the factory returned last. Ranks make a
    model of their own, since the one that trains can't run on a single rank.
    """
    if not tensorboard.is_installed():
        return []

    def graph() -> tuple[nn.Module, Any]:
        alone = program.parts.world.is_single
        return copy.deepcopy(program.model).cpu() if alone else task.build_model(), batch_inputs(
            first_batch(task.roles)
        )

    return [tensorboard.TensorBoard(graph if task.loss is not None else None, say)]


def _new_folder(run: Path | None, name: str) -> Path:
    """The folder of a new run."""
    path = run or _unused_path(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    Run.check_new(path)
    return path


def _unused_path(path: Path) -> Path:
    """`path`, or where that is taken `path` with a number."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def task_of_run(run: Run, task: Task | None = None, *, trust: bool = False, say: Report = lambda line: None) -> Task:
    """The Task of a run: the one given, the one it was just trained with, or the copy of its source in the folder.

    Args:
        trust: let that copy run, whoever started the run; `say` is told if that can't be stored.
    """
    task = task or run.task
    if task is None:
        if run.record.source is None:
            raise TaskError(
                f"{run.path} was trained from Python, so the folder has no file with its Task",
                expected="the Task",
                fix="pass it from Python: hotloop.fit(task, run=..., resume=True), hotloop.predict(..., task=task)",
            )
        require_trust(run.record, run.path, trust, say)
        task = load_from_run(run.source, run.record.source)
    return override_fields(task, run.record.overrides)
