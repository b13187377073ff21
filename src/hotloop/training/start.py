"""Starts and resumes runs."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hotloop.advisor.ledger import measure_prediction, prediction_key
from hotloop.advisor.this_machine import chip_name
from hotloop.core.callback import Callback
from hotloop.core.files.source_files import files_of
from hotloop.core.files.trust import store_trust as trust_run
from hotloop.core.float32_switches import apply_switches, read_switches
from hotloop.core.format import parse_seconds
from hotloop.core.hardware import limits
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.machine import result_versions
from hotloop.core.hardware.machine_load import LoadMeter
from hotloop.core.number_formats import other_settings
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.training import RunRecord
from hotloop.core.reporter import Say
from hotloop.data.content_digest import content_digest
from hotloop.distributed.join import RankSession, join_ranks
from hotloop.distributed.launch import local_rank_count
from hotloop.errors import DiskError, HotloopError, RunError
from hotloop.lowering.build import close_on_error, lower
from hotloop.lowering.parameter_server.workers.worker import RemoteTask
from hotloop.lowering.parameter_server.workers.worker_start import single_worker_plan, start_workers
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import task_facts
from hotloop.lowering.transforms.cudnn import cudnn_inexact_reasons
from hotloop.plan import Plan
from hotloop.report.learning_curves import draw_curves
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.training import tensorboard
from hotloop.training.cadence import CheckpointCadence
from hotloop.training.early_stopping import EarlyStopping, RunOutcome
from hotloop.training.live_search import live_drive
from hotloop.training.loggers.adapters import ADAPTERS, check_loggers
from hotloop.training.loggers.figure_logger import FigureLogger
from hotloop.training.loop import train_loop
from hotloop.training.monitor import monitor_of
from hotloop.training.plan_switcher import check_same_task, with_replayed_plan, without_live_request
from hotloop.training.rehearsal import RehearsalRequest, Rehearsals
from hotloop.training.resume import check_files, check_overrides, describe_files, task_of_run
from hotloop.training.run import Run, is_run
from hotloop.tuning.auto import count_trained_steps, is_step_count_stored, lower_cached_or_auto, with_facts
from hotloop.tuning.run_context import RunContext


def start_run(context: RunContext, run: Path | None = None, began: float | None = None) -> tuple[Run, RunOutcome]:
    """Starts a new run, in the folder `run` or one with a free name.

    As one of several ranks that were killed and started again, continues their run.

    Args:
        began: when `stop_after` begins to count, in seconds by `time.monotonic()`; default now.
    """
    began = time.monotonic() if began is None else began
    context = with_replayed_plan(context)
    wanted, every = PlanRequest.with_auto_default(context.plan, context.axes), context.checkpoint_every or "auto"
    context, plan = replace(context, wanted=wanted, checkpoint_every=every), wanted.plan
    with join_ranks(plan, context.say, plan.ranks, context.rank_timeout) as ranks:
        context = context.on_rank(ranks.world.is_rank_zero)
        begun = ranks.begun() or (run if run is not None and ranks.cut_short_at(run) is not None else None)
        if run is None and ranks.without_history:
            raise RunError(
                "the run has no name, and torchrun has no store that outlives its ranks",
                expected="a name, by which ranks that are started again find it",
                fix="give --run (or run=), or unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            )
        # Without a run in the folder, a rank was killed before the run's first step.
        if begun is not None and ranks.world.broadcast_object(partial(is_run, Path(begun))):
            return _resume_in_rank(context, Path(begun), ranks)
        run = run if begun is None else Path(begun)
        context = context.with_overrides()
        until = began + check_options(context.task, context.stop_after, context.checkpoint_every or "auto")
        path = ranks.world.broadcast_object(lambda: _new_folder(run, context.task.name))
        context = with_facts(replace(context, until=until))
        program, reasons = _lower(context)
        handle = _create_run(context, path, program, ranks)
        handle.plan_reasons = reasons
        with _run_locked(context, handle):
            return handle, _train(context, handle, program, ranks.limit_s)


def _lower(context: RunContext) -> tuple[Program, list[str]]:
    """Returns the Program, and the lines that were reported on the choice of its plan."""
    if context.program is not None:
        return context.program, []
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        context.say(line)

    return lower_cached_or_auto(replace(context, reporter=replace(context.reporter, say=say))), lines


def _create_run(context: RunContext, path: Path, program: Program, ranks: RankSession) -> Run:
    task, source = context.task, context.source.record
    as_requested = replace(program.parts, task=task, splits=task.roles)  # facts describe the Task, not its plan
    data, unknown_data = content_digest(task.data, task.validation, task.test)
    record = RunRecord(
        id=uuid.uuid4().hex,
        name=task.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        source=source,
        overrides=dict(context.overrides),
        facts=program.parts.facts or task_facts(as_requested, source.digest if source else ""),
        classes=list(task.classes or task.roles.classes),
        note=task.roles.note,
        checkpoint_every=context.checkpoint_every or "auto",
        reader=describe_files(task),
        has_class_scores=task.objective.cross_entropy and task.predict is None,
        switches=read_switches(),
        data=data,
        unknown_data=unknown_data,
        versions=result_versions(),
    )
    for line in check_same_task(record, context.replay, has_schedule=task.schedule is not None):
        context.say(line)
    made = (path, record, program.parts.plan)
    ranks.begin(str(path.absolute()))  # before the run exists, so that ranks that are started again find the run
    with close_on_error(program):
        if ranks.world.is_rank_zero:
            handle = Run.create(*made, context.source.files)
        else:
            handle = Run(*made, writes=False)
    if ranks.world.is_rank_zero and source is not None:
        for note in trust_run(record, path):
            context.say(note)
    for line in [*filter(None, [task.roles.note]), *record.facts.inexact]:
        context.say(line)
    return handle


def check_options(task: Task, stop_after: str | None, checkpoint_every: str) -> float:
    """Checks options before training, and returns the time limit in seconds.

    Raises:
        PlanError: `stop_after` or `checkpoint_every` is no time.
        TaskError: the Task monitors a metric of data that it doesn't have.
    """
    CheckpointCadence.parse(checkpoint_every)
    check_loggers(task.loggers)
    limit_s = math.inf if stop_after is None else parse_seconds(stop_after, "stop-after")
    EarlyStopping.of(task.monitor, task.goal, task.roles.validation is not None)
    return limit_s


def resume_run(context: RunContext, path: Path) -> tuple[Run, RunOutcome]:
    """Continues a run where it was stopped or killed, under the plan of the context if there is one."""
    context = without_live_request(context, path)
    plan, axes = context.plan, context.axes
    own = Run.open(path).plan if plan is None else None
    wanted = PlanRequest.from_value(plan if own is None else _feasible_own_plan(own, axes), axes)
    named = wanted.plan.ranks if plan is not None or "ranks" in axes else None
    with join_ranks(wanted.plan, context.say, named, context.rank_timeout) as ranks:
        context = replace(context, wanted=wanted).on_rank(ranks.world.is_rank_zero)
        if own is not None and wanted.plan.allocator != own.allocator and "allocator" not in axes:
            context.say(
                "memory of steps isn't reused from here on: this machine's allocator has no such setting; the "
                "result has the same bits"
            )
        return _resume_in_rank(context, path, ranks)


def _feasible_own_plan(own: Plan, axes: Mapping[str, Any]) -> Plan:
    """Returns a run's plan without an allocator that this process can't use; the results have the same bits.

    The stages depend on the number of ranks; `PlanRequest.with_split` restores them for the same number.
    """
    own = own if "split" in axes else own.with_axes(split="auto")
    asked = "allocator" in axes or limits.active_allocator() is not None
    return own if asked else own.with_axes(allocator="default")


def _resume_in_rank(context: RunContext, path: Path, ranks: RankSession) -> tuple[Run, RunOutcome]:
    say, every, overrides = context.say, context.checkpoint_every, context.overrides
    handle = Run.open(path, writes=ranks.world.is_rank_zero)
    for damage in handle.damages() if ranks.world.is_rank_zero else ():
        say(damage)
    passed_s = ranks.begin(str(path.absolute()), ranks.cut_short_at(path, theirs=True))
    wanted = context.wanted.with_split(handle.plan, ranks.world.ranks)
    if every is not None:
        CheckpointCadence.parse(every)
        handle.record = handle.record.model_copy(update={"checkpoint_every": every})
    began, limit = time.monotonic() - passed_s, context.stop_after
    until = math.inf if limit is None else began + parse_seconds(limit, "stop-after")
    loaded = context.loaded
    before = task_of_run(handle, None if loaded is None else loaded.task, trust=context.trust, say=say)
    check_files(handle.record, before)
    check_overrides(handle.record.facts, before, overrides)
    handle.record = handle.record.model_copy(update={"overrides": {**handle.record.overrides, **overrides}})
    loaded = loaded or LoadedTask(before, handle.record.source, files_of(handle.source))
    done = handle.epochs[-1]["step"] if handle.epochs else 0
    context = replace(context, loaded=replace(loaded, task=before), wanted=wanted, until=until, is_resumed=True)
    context = replace(context, done=done).with_overrides()
    task = context.task
    check_loggers(task.loggers)
    if (final := handle.final) is not None and len(handle.epochs) >= _last_epoch(handle, task, final):
        say(f"{path} is finished already; --epochs with a larger number goes on with it")
        return handle, RunOutcome("finished", True, [], final)
    if task.schedule is not None and task.epochs != before.epochs:
        say(
            f"the learning-rate schedule was made for {before.epochs} epochs: check its values in the epochs after them"
        )
    then = handle.record.versions
    if other := [
        f"{name} {then[name]} then, {now} now" for name, now in result_versions().items() if then.get(name, now) != now
    ]:
        say(f"{', '.join(other)}: the result may differ in its last bits")
    for reason in handle.record.facts.inexact:
        say(reason)
    with _restore_switches(handle, wanted, say):
        context = with_facts(context) if is_step_count_stored(context) else context
        with _run_locked(context, handle):
            program, handle.plan_reasons = _lower(context)
            return handle, _train(context, handle, program, ranks.limit_s)


@contextmanager
def _restore_switches(handle: Run, wanted: PlanRequest, say: Say) -> Iterator[None]:
    """Sets torch's switches as at the start of the run."""
    now, device = read_switches(), resolve_device(wanted.plan).device.partition(":")[0]
    then = now | handle.record.switches
    if line := other_settings(then, now, device):
        say(line)
    with apply_switches(then, device):
        yield


def _last_epoch(handle: Run, task: Task, final: dict[str, Any]) -> int:
    """Returns the last epoch; an early stop counts as the end."""
    return task.epochs if final["reason"] == "finished" else len(handle.epochs)


@contextmanager
def _run_locked(context: RunContext, handle: Run) -> Iterator[None]:
    """Locks the run's folder while it is trained, and counts the steps for later runs.

    A new run that fails before its first step is removed. A resumed run that fails before its first event keeps its plan
    and record.
    """
    handle.lock()
    before, events, reached = handle.as_written(), _event_count(handle), handle.reached()
    try:
        yield
    except (HotloopError, KeyboardInterrupt) as error:
        if isinstance(error, DiskError) and handle.checkpoints.files():
            error = DiskError(
                error.given,
                expected=error.expected,
                fix=f"{error.fix}, then go on from the last good checkpoint with --resume {handle.path}",
            )
        if context.is_resumed and _event_count(handle) == events:
            handle.keep(plan=before.plan, record=before.record)
        elif (context.is_resumed or not handle.discard()) and isinstance(error, HotloopError):
            handle.log_failure(error)
        raise error
    finally:
        handle.unlock()
        if handle.writes:
            count_trained_steps(context, handle.reached() - reached)


def _event_count(handle: Run) -> int:
    """Notes of inexact results are written before a training begins, so they don't count."""
    return sum(row["event"] != "inexact" for row in handle.journal())


def _train(context: RunContext, handle: Run, program: Program, limit_s: float | None) -> RunOutcome:
    """Trains in the run's folder, beginning with `program`.

    Args:
        limit_s: how long a server waits for its workers, see `start_workers`.
    """
    task, say, plan = context.task, context.say, program.parts.plan
    ready = [_with_workers(program, handle, task, limit_s, say)]

    def relower() -> Program:
        return ready.pop() if ready else lower(task, single_worker_plan(plan) if plan.parallel == "async" else plan)

    changed = {name: getattr(handle.record, name) for name in ("overrides", "checkpoint_every")}
    drive = live_drive(context, handle, plan)
    compares = drive is None and _takes_same_steps(context, handle, plan)  # a search may resume with another plan
    handle.keep(plan=plan, record=handle.as_written().record.model_copy(update=changed))
    handle.task = task
    if context.has_user_callbacks and not task.built_last(program.model):
        say(
            "the model factory has made other models since the one that is trained: a callback must not change the last"
        )
    for reason in cudnn_inexact_reasons(program.parts):
        if handle.note_inexact(reason):
            say(reason)
    writers: list[Any] = []
    if handle.writes:
        context.store_plan_search(handle.path)
        writers = [monitor_of(program, say), *_figure_loggers(task, handle, say)]
    load = LoadMeter()
    with ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer.open())
        outcome = train_loop(
            relower,
            handle,
            resume=context.is_resumed,
            compares=compares,
            rehearsals=_rehearsals(context, handle),
            stop_after_s=None if math.isinf(context.until) else context.until - time.monotonic(),
            pause_after_epoch=context.pause_after_epoch,
            callbacks=[*_callbacks(context, program), *writers] if writers else (),
            say=say,
            drive=drive,
        )
    if (
        plan.parallel == "none"
        and handle.plan == plan
        and outcome.history
        and (line := _compare_with_prediction(context, plan, outcome, load.busy()))
    ):
        say(line)
    return outcome


def _takes_same_steps(context: RunContext, handle: Run, plan: Plan) -> bool:
    """Returns whether the steps of a resumed run should have the bits that the process before it had."""
    is_unchanged = context.plan is None and not context.axes and not context.overrides
    then, now = handle.record.versions, result_versions()
    is_same_plan = plan.with_axes(allocator=handle.plan.allocator) == handle.plan
    return context.is_resumed and is_unchanged and is_same_plan and then == now and handle.record.facts.exact


def _rehearsals(context: RunContext, handle: Run) -> Rehearsals | None:
    request = RehearsalRequest.parse(context.rehearse)
    if request.limit == 0 or not handle.writes:
        return None
    return Rehearsals(handle, request, context.say, started_s=time.process_time())


def _figure_loggers(task: Task, handle: Run, say: Say) -> list[FigureLogger]:
    record, plan = handle.record, handle.plan
    settings: dict[str, Any] = {"task": record.name, "plan": plan.brief(), "batch_size": record.facts.batch_size}
    settings |= record.overrides | (record.source.parameters if record.source else {})
    return [FigureLogger(name, ADAPTERS[name](), settings, say) for name in ADAPTERS if name in task.loggers]


def _compare_with_prediction(context: RunContext, plan: Plan, outcome: RunOutcome, busy: str) -> str | None:
    """Returns a line with the step that `hotloop advise` predicted and the measured step; None without a prediction."""
    size = context.task.roles.batch_size
    step_ms = 1e3 * size / max(record.samples_per_s for record in outcome.history)
    key = prediction_key(context.task.name, size, context.source.record, plan)
    return measure_prediction(key, chip_name(plan.device), step_ms, busy)


def _with_workers(program: Program, handle: Run, task: Task, limit_s: float | None, say: Say) -> Program:
    plan, record = program.parts.plan, handle.record
    if plan.parallel != "async":
        return program
    recipe = RemoteTask.from_task(task, handle.source, record.source, record.overrides)
    return start_workers(program, recipe, local_rank_count(plan), say, limit_s)


def _callbacks(context: RunContext, program: Program) -> list[Callback]:
    reports = (
        [draw_curves, *tensorboard.callbacks_for(context.task, program, context.say)] if context.has_reports else []
    )
    return [*context.task.callbacks, *reports, *context.callbacks]


def _new_folder(run: Path | None, name: str) -> Path:
    path = run or _unused_path(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    Run.check_new(path)
    return path


def _unused_path(path: Path) -> Path:
    """Returns `path`, with a number if `path` exists."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())
