"""Starts, continues and reports studies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.source_files import split_reference
from hotloop.core.files.trust import require_trust, store_trust
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.study import StudyResult, TrialRecord
from hotloop.core.reporter import Say
from hotloop.core.terminal import Terminal
from hotloop.errors import HotloopError, StudyError
from hotloop.hyperparameters import samplers
from hotloop.hyperparameters.results import CHANGES, study_result
from hotloop.hyperparameters.space import Space, check_same_space, parse_space
from hotloop.hyperparameters.study_folder import StudyFolder, make_folder, new_folder
from hotloop.hyperparameters.study_options import PLAN_FILE, RAY, StudyOptions
from hotloop.hyperparameters.trial_processes import TaskSource, TrialProcesses, Workers
from hotloop.hyperparameters.trial_rounds import FINISHED, Rounds
from hotloop.plan import Plan
from hotloop.report.study import study_lines, study_table, write_study

if TYPE_CHECKING:
    from hotloop.training.run import Run

_TRIALS = "trials"

_ATTEMPTS = 3
"""Times that the Task is loaded, if the system kills its process."""

_LATE_MODULES = ("optuna.storages._rdb.models", "alembic.command", "sklearn.ensemble")
"""What Optuna imports late, for its storage and for the importance of parameters."""


def start_study(
    source: TaskSource, space: Space, options: StudyOptions, path: Path | None, processes: TrialProcesses, say: Say
) -> StudyResult:
    """Runs a new study.

    Args:
        path: a new folder; None for `studies/<name>-<date>-<time>`.
        processes: a context that is open.

    Raises:
        StudyError: the space, an option or the folder can't be used.
        TaskError: the Task can't be loaded.
    """
    options.check()
    until = options.until
    is_new = path is None or not path.exists()
    path = make_folder(Path(split_reference(source.reference)[0]).stem) if path is None else path
    with new_folder(path):
        processes.log = path / "logs"
        try:
            folder = _create(source, space, options, path, processes)
        except BaseException:
            if is_new:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return _run(folder, processes, source.make_task, options, until, [], say)


def _create(
    source: TaskSource, space: Space, options: StudyOptions, path: Path, processes: TrialProcesses
) -> StudyFolder:
    with _late_imports():
        found = processes.run(
            "hotloop.hyperparameters.trial:describe",
            "task.txt",
            attempts=_ATTEMPTS,
            reference=source.reference,
            make_task=source.make_task,
            space=space,
            device=options.device,
            settings=options.settings,
        )
    if isinstance(found, HotloopError):
        raise found
    if found is None:
        raise StudyError("the process that loads the Task was killed", expected="enough memory for the Task's data")
    processes.prepare(found.modules, found.reads)
    rungs = samplers.rungs(found.record.pruner, found.record.epochs)
    record = found.record.model_copy(update={"rungs": rungs})
    samplers.check_settings(record)
    if record.plan == PLAN_FILE:
        write_atomic(path / PLAN_FILE, PlanRequest.from_value(options.plan).plan.to_toml())
    folder = StudyFolder.create(path, record, found.files)
    store_trust(record, path)
    return folder


def resume_study(
    path: Path,
    space: Space,
    options: StudyOptions,
    make_task: bytes | None,
    processes: TrialProcesses,
    say: Say,
    *,
    trust: bool = False,
) -> StudyResult:
    """Goes on with a study where it was stopped or killed; `options` change the number of trials, jobs and the time.

    Args:
        space: the study's space, or an empty space.
        make_task: the function of a study from Python.
        processes: a context that is open.
        trust: execute the source in the folder, also of a study that somebody else started.

    Raises:
        StudyError: the space or a setting isn't the study's, or the folder can't be used.
    """
    options.check()
    folder = _open(path, make_task, say, trust)
    options.check_same(folder.record, path)
    if space:
        check_same_space(space, folder.record.space)
    processes.log = path / "logs"
    with _late_imports():
        changes = processes.run(  # a process of trials knows torch's version
            "hotloop.hyperparameters.trial:version_changes", "task.txt", attempts=_ATTEMPTS, then=folder.record.versions
        )
    if isinstance(changes, HotloopError):
        raise changes
    return _run(folder, processes, make_task, options, options.until, changes or [], say)


def continue_trial(
    path: Path, number: int, make_task: bytes | None, processes: TrialProcesses, say: Say, *, trust: bool = False
) -> StudyResult:
    """Trains a pruned trial of a study to its end, exactly as if it had not been pruned."""
    folder = _open(path, make_task, say, trust)
    processes.log = path / "logs"
    with samplers.silence_optuna(), folder.locked():
        result = study_result(folder, FINISHED)
        if not 0 <= number < len(result.trials):
            raise StudyError(f"--continue {number}", expected=f"a trial from 0 to {len(result.trials) - 1}")
        if (state := result.trials[number].state) != "pruned":
            raise StudyError(f"trial {number} is {state}", expected="a pruned trial")
        Rounds(folder, processes, make_task, 1, say).train_to_end(number)
        return _report(folder, FINISHED)


def _open(path: Path, make_task: bytes | None, say: Say, trust: bool) -> StudyFolder:
    folder = StudyFolder.open(path)
    if folder.record.source is None and make_task is None:
        raise StudyError(
            f"the study in {path} was started from Python, so the folder has no file with its Task",
            expected="the function",
            fix=f"go on from Python: hotloop.study(make_task, resume={str(path)!r})",
        )
    if folder.record.source is not None:
        require_trust(folder.record, path, trust, say)
        folder.check_source()
    return folder


def _run(
    folder: StudyFolder,
    processes: TrialProcesses,
    make_task: bytes | None,
    options: StudyOptions,
    until: float,
    changes: list[str],
    say: Say,
) -> StudyResult:
    """Runs rounds to the end, and reports.

    Args:
        until: when no further round begins, in seconds by `time.monotonic()`.
        changes: lines on versions that aren't the study's.
    """
    with folder.locked(), samplers.silence_optuna():
        study = folder.optuna
        if changes:
            study.set_user_attr(CHANGES, list(dict.fromkeys([*study.user_attrs.get(CHANGES, []), *changes])))
        trials = options.trials or study.user_attrs.get(_TRIALS, folder.record.trials)
        if (limit := samplers.trial_limit(folder.record)) is not None and trials > limit:
            say(f"the grid has {limit} points, so the study has {limit} trials")
            trials = limit
        study.set_user_attr(_TRIALS, trials)
        try:
            with _workers(folder, processes, options) as (workers, jobs):
                if options.jobs and jobs > (at_once := folder.record.round_size * folder.record.repeats):
                    say(f"of {jobs} jobs {at_once} work at the same time: a round has {at_once} runs (--round)")
                ended = Rounds(folder, workers, make_task, jobs, say).run(trials, until)
        except KeyboardInterrupt:
            say(f"saved; go on with: hotloop study --resume {folder.path}")
            raise
        if ended != FINISHED:
            say(f"stopped ({ended}), saved; go on with: hotloop study --resume {folder.path}")
        return _report(folder, ended)


@contextmanager
def _late_imports() -> Iterator[None]:
    """Imports what Optuna imports late, while the block waits for a process."""
    with ThreadPoolExecutor(1) as pool:
        imports = pool.map(import_module, _LATE_MODULES)
        yield
        list(imports)


@contextmanager
def _workers(folder: StudyFolder, processes: TrialProcesses, options: StudyOptions) -> Iterator[tuple[Workers, int]]:
    """Yields what runs the trials, and how many at the same time."""
    if options.jobs_on != RAY:
        yield processes, options.jobs or 1
        return
    from hotloop.hyperparameters.ray_trials import RayTrials

    has_gpu = str(folder.record.axes.get("device", "cpu")).startswith("cuda")
    with RayTrials(processes.log, options.jobs, has_gpu) as workers:
        yield workers, options.jobs or workers.cores


def _report(folder: StudyFolder, ended: str) -> StudyResult:
    """Returns the result, and writes the winner's link and the page."""
    result = study_result(folder, ended)
    if result.winner is not None:
        folder.link_best(folder.run_path(result.winner.number))
    write_study(folder.path / "study.html", result, folder.optuna)
    return result


class Study:
    """A study that has ended or was stopped.

    Attributes:
        path: the folder.
        result: trials, winner and importance; see `StudyResult`.
    """

    def __init__(self, result: StudyResult, make_task: Callable[..., Any] | None = None) -> None:
        self.path, self.result, self._make_task = Path(result.study), result, make_task

    def __repr__(self) -> str:
        best = self.best
        found = "no complete trial" if best is None else f"best={best.value!r}, params={best.params!r}"
        return f"Study({str(self.path)!r}, trials={len(self.result.trials)}, {found})"

    @property
    def trials(self) -> list[TrialRecord]:
        return self.result.trials

    @property
    def best(self) -> TrialRecord | None:
        """The winner; None if no trial is complete."""
        return self.result.winner

    @property
    def importance(self) -> dict[str, float]:
        return self.result.importance

    @property
    def run(self) -> Run:
        """The winner's run, for `hotloop.load_model`, `evaluate`, `predict` and `export`.

        Raises:
            StudyError: no trial is complete.
        """
        from hotloop.training.run import Run  # imports torch

        if self.best is None:
            raise StudyError(f"no trial of {self.path} is complete", expected="one at least")
        handle = Run.open(Path(self.best.runs[0]))
        if self._make_task is not None:
            record = StudyFolder.open(self.path).record
            handle.task = self._make_task(**{k: v for k, v in self.best.params.items() if k in record.arguments})
        return handle

    def continue_trial(self, number: int) -> Study:
        """Trains a pruned trial to its end, exactly as if it had not been pruned; returns the study with the result."""
        make_task = None if self._make_task is None else TaskSource.from_value(self._make_task).make_task
        with TrialProcesses() as processes:
            result = continue_trial(self.path, number, make_task, processes, lambda line: None)
        return Study(result, self._make_task)


def study(
    make_task: Callable[..., Any] | str | Path,
    space: Mapping[str, Any] | None = None,
    *,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
    round_size: int | None = None,
    jobs: int | None = None,
    jobs_on: str = "processes",
    seed: int | None = None,
    repeats: int | None = None,
    constraints: Sequence[str] | None = None,
    time_limit: str | None = None,
    plan: Plan | str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Study:
    """Searches the hyper-parameters with the best monitored figure; the same seed gives the same trials and winner.

    Each trial is trained in a process of its own, and is a run folder.

    Args:
        make_task: a function that returns the Task, with the hyper-parameters as arguments; or a Task's file.
        space: name -> `"1e-4..1e-1:log"`, `"16..256:int"`, a list of values, a value, or a table with `when`. The names
            are arguments of `make_task`, or `batch_size`, `epochs` and `seed` of the Task.
        folder: a new folder; default `studies/<name>-<date>-<time>`.
        resume: the folder of a study to go on with; `trials` is then the new total, and settings that change the
            result must be those of the study, or left out.
        trials: number of trials; default 20.
        sampler: `tpe` (default), `cmaes`, `gp`, `grid` or `random`, all of Optuna.
        pruner: `none` (default), `median`, `hyperband` or `halving`, all of Optuna.
        round_size: trials that are proposed together; part of the study, unlike `jobs`; default 8.
        jobs: trials that train at the same time; default 1, or the cores of Ray's cluster.
        jobs_on: `processes` of this machine, or `ray` for the machines of a Ray cluster, which share the study's folder.
        seed: of the search; default 0.
        repeats: seeds for each trial, whose value is the mean; default 1.
        constraints: limits such as `memory < 4GB` and `step_ms < 5`; the result is then not exact.
        time_limit: a time such as `1h`, after which no further round begins.
        plan: as in `fit`; `auto` finds the fastest proven plan once for each shape of network. Default: the rules' plan.
        device: overrides the plan's.
        progress: print a line for each trial, and the table.

    Raises:
        StudyError: the space, an option or the folder can't be used.
        TaskError: the Task can't be loaded.
    """
    console = Terminal() if progress else Terminal(quiet=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    options = StudyOptions(
        trials, sampler, pruner, round_size, jobs, seed, repeats, constraints, time_limit, plan,
        {} if device is None else {"device": device}, jobs_on,
    )  # fmt: skip
    source = TaskSource.from_value(make_task)
    given, place = parse_space(space or {}), None if folder is None else Path(folder)
    options.check()
    with TrialProcesses() as processes:
        if resume is not None:
            result = resume_study(Path(resume), given, options, source.make_task, processes, say)
        else:
            result = start_study(source, given, options, place, processes, say)
    console.print(study_table(result))
    for line in study_lines(result):
        say(line)
    return Study(result, make_task if callable(make_task) else None)
