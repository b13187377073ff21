"""Starts, resumes and lowers with single arguments in place of a `RunContext`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotloop.core.plan_request import PlanRequest
from hotloop.core.reporter import Reporter
from hotloop.lowering.program import Program
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.training import start
from hotloop.training.early_stopping import RunOutcome
from hotloop.training.run import Run
from hotloop.tuning import auto
from hotloop.tuning.run_context import RunContext

Say = Callable[[str], None]


def silent(line: str) -> None:
    pass


def start_run(
    loaded: LoadedTask, *, run: Path | None = None, say: Say = silent, began: float | None = None, **options: Any
) -> tuple[Run, RunOutcome]:
    return start.start_run(RunContext(loaded, reporter=Reporter(say), **options), run, began)


def resume_run(path: Path, *, task: Task | None = None, say: Say = silent, **options: Any) -> tuple[Run, RunOutcome]:
    loaded = None if task is None else LoadedTask(task, None, {})
    return start.resume_run(RunContext(loaded, reporter=Reporter(say), **options), path)


def lower_requested(task: Task, wanted: PlanRequest, say: Say = silent, **fields: Any) -> Program:
    return lower_cached_or_auto(LoadedTask(task, None, {}), wanted, say, **fields)


def lower_cached_or_auto(loaded: LoadedTask, wanted: PlanRequest, say: Say = silent, **fields: Any) -> Program:
    return auto.lower_cached_or_auto(RunContext(loaded, wanted=wanted, reporter=Reporter(say), **fields))
