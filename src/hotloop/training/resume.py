"""Checks of a resumed run: a valid checkpoint, unchanged data, a schedule that is long enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotloop.core.files.trust import require_trust
from hotloop.core.records.training import RunRecord, TaskFacts
from hotloop.core.reporter import Say
from hotloop.data.bundle import Bundle
from hotloop.errors import CheckpointError, RunError, TaskError, describe_error, is_out_of_memory
from hotloop.lowering.program import Program
from hotloop.task import Task, override_fields
from hotloop.task_file import load_from_run
from hotloop.training.checkpoint import Checkpoint
from hotloop.training.run import Run

_REMEDY = "use the Task that the run was started with, or start a new run"


def check_overrides(facts: TaskFacts, task: Task, overrides: Mapping[str, Any]) -> None:
    """Raises RunError if an override changes the batch size or the seed, and with these the order of the data."""
    fixed = {"batch_size": facts.batch_size, "seed": task.seed}
    for name, value in fixed.items():
        if overrides.get(name, value) != value:
            raise RunError(
                f"{name}={overrides[name]} would change the order of the data in the middle of the run",
                expected=f"{name}={value}, as it was started with",
                fix="leave it out, or start a new run",
            )


def newest_valid_checkpoint(run: Run, say: Callable[[str], None]) -> tuple[Checkpoint, Path] | None:
    """Returns the newest valid checkpoint and its file; None if none was written.

    Raises:
        CheckpointError: no checkpoint is valid, or all were removed. A silent restart would lose the training.
    """
    checkpoints, saved = run.checkpoints, run.last_saved()
    found = checkpoints.newest(say, best_needed=False)
    if found is None and checkpoints.files():
        raise CheckpointError(
            f"no checkpoint in {checkpoints.folder} is good",
            expected="a checkpoint to continue from",
            fix="restore one from a copy, or start a new run",
        )
    if found is None and saved is not None:
        raise CheckpointError(
            f"{checkpoints.folder} has no checkpoint, and the journal says that one of step {saved:,} was written",
            expected="a checkpoint to continue from",
            fix="restore one from a copy, or start a new run",
        )
    return found


def restore_program(program: Program, checkpoint: Checkpoint, path: Path) -> None:
    """Restores a checkpoint's State.

    Raises:
        CheckpointError: the checkpoint is of another Task, or has invalid content.
    """
    position, batches = checkpoint.state.position, program.feed.batches
    try:
        if batches is not None and position.batch > batches:
            raise ValueError(f"it is {position.batch:,} batches into an epoch of {batches:,}")
        program.restore(checkpoint.state)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path.name} can't be restored: {describe_error(error)}",
            expected="what a training with this Task has written",
            fix="use the Task that the run was started with, remove this checkpoint to go on from the one before it,"
            " or start a new run",
        ) from error


def check_data(facts: TaskFacts, program: Program) -> None:
    """Raises RunError if samples, batch size, order or held-out samples differ from the run's `facts`."""
    roles = program.parts.splits
    samples = roles.order.samples if roles.order else None
    if (facts.samples, facts.batch_size) != (samples, roles.batch_size):
        raise RunError(
            f"the Task has {samples} samples in batches of {roles.batch_size}",
            expected=f"{facts.samples} in batches of {facts.batch_size}, as when the run was started",
            fix=_REMEDY,
        )
    if facts.order != roles.digest:
        raise RunError(
            "the Task's seed, shuffle, drop_last or validation is not what the run was started with",
            expected="the same order of the data, and the same samples held out",
            fix=_REMEDY,
        )


def describe_files(task: Task) -> dict[str, Any]:
    """Returns `RunRecord.reader` of a Task with a data set of files; empty for other data."""
    bundle = task.data
    return bundle.reader.to_json() | {"digest": bundle.digest} if isinstance(bundle, Bundle) and bundle.reader else {}


def check_files(record: RunRecord, task: Task) -> None:
    """Raises RunError if the data set's files were changed since the start of the run.

    The split of changed files is another: the run's training samples would be among the new test samples.
    """
    now = describe_files(task)
    if record.reader and now and record.reader["digest"] != now["digest"]:
        raise RunError(
            f"the files of the data set {task.data.name!r} are not those that the run was started with",
            expected="the same files, and so the same training, validation and test samples",
            fix="restore the files, or start a new run",
        )


def check_schedule(program: Program) -> None:
    """Raises RunError if the remaining epochs take more steps than the restored schedule has left."""
    task, position, left = program.parts.task, program.position, program.schedule_left()
    epochs = task.epochs - position.epoch
    needed = epochs if task.schedule_every == "epoch" else epochs * (program.feed.batches or 0) - position.batch
    if left is not None and needed > left:
        raise RunError(
            f"the learning-rate schedule has {left} steps left, and going on to epoch {task.epochs} takes {needed}",
            expected="no more epochs than the schedule was made for",
            fix="leave --epochs out, or start a new run",
        )


def task_of_run(run: Run, task: Task | None = None, *, trust: bool = False, say: Say = lambda line: None) -> Task:
    """Returns the Task of a run: `task`, the Task of this process, or that of the source in the folder.

    Args:
        trust: execute the source in the folder, also of a run that somebody else started.
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
