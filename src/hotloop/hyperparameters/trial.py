"""The work of a trial's process: reads the Task's parameters, and trains one run of a trial up to an epoch."""

from __future__ import annotations

import hashlib
import json
import math
import resource
import sys
import time
import traceback
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
from filelock import FileLock, Timeout

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.package_use import PackageUse
from hotloop.core.files.source_files import files_of
from hotloop.core.hardware.devices import check_device
from hotloop.core.hardware.machine import read_processor, result_versions
from hotloop.core.installed_code import is_installed
from hotloop.core.plan_request import AUTO, PlanRequest
from hotloop.core.records.race import Verdict
from hotloop.core.records.study import RULES_PLAN, ParameterRecord, StudyRecord, TrialProgress, Value
from hotloop.core.reporter import Reporter, Say
from hotloop.core.task_parts.optimizers import member_optimizers
from hotloop.data import builtin
from hotloop.errors import (
    DeviceError,
    HotloopError,
    MemoryExhausted,
    PlanError,
    StudyError,
    TaskError,
    call_user_code,
    describe_error,
    is_out_of_memory,
    type_name,
)
from hotloop.hyperparameters.space import TASK_FIELDS, Space, as_text, check_names, first_values, largest
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.task_file import (
    LoadedTask,
    load_from_run,
    load_task,
    named_parameters,
    parse_argument,
    task_parameters,
)
from hotloop.training.early_stopping import EarlyStopping, RunOutcome
from hotloop.training.run import Run, is_run
from hotloop.training.start import resume_run, start_run
from hotloop.tuning.auto import feasibility_facts, list_options
from hotloop.tuning.run_context import RunContext

_LOCK_S = 60.0


@cache
def study_versions() -> dict[str, str]:
    """Returns what the bits of a study's result depend on."""
    processor = read_processor()
    name = f"{processor.model or processor.architecture}, {processor.kernels} kernels"
    return result_versions() | {"optuna": version("optuna"), "processor": name}


def version_changes(then: Mapping[str, str]) -> list[str]:
    """Returns a line for each version that isn't the study's."""
    return [
        f"{name} {then[name]} at the start of the study, {now} later: the result may differ in its last bits"
        for name, now in study_versions().items()
        if then.get(name, now) != now
    ]


class Description(NamedTuple):
    """What a study needs to know of the Task.

    Attributes:
        record: the study's settings and the Task's, without `rungs`, for which Optuna is needed.
        files: content of the source files by path; empty for a function of Python.
        modules: installed modules that the Task has imported; `reads`: built-in data sets that it has read.
    """

    record: StudyRecord
    files: dict[str, bytes]
    modules: list[str]
    reads: list[builtin.BuiltinRead]


def describe(
    reference: str, make_task: bytes | None, space: Space, device: str | None, settings: Mapping[str, Any]
) -> Description:
    """Returns the Description of a Task.

    Args:
        reference: the Task's file; for `make_task`, a name for messages.
        make_task: a function of Python, by cloudpickle.
        device: of all trials; None for any device.
        settings: fields of StudyRecord that the user sets.

    Raises:
        DeviceError: the device is missing.
        StudyError: an argument of `task(...)` is unknown, or doesn't take the values of the space.
        TaskError: the Task can't be loaded.
    """
    if device is not None:
        check_device(device)
    known = set(sys.modules)
    function = None if make_task is None else cloudpickle.loads(make_task)
    parameters = task_parameters(reference) if function is None else named_parameters(function)
    values = first_values(space)
    needed = {
        name: values[name]
        for name, parameter in parameters.items()
        if name in space and (space[name].is_fixed or parameter.default is parameter.empty)
    }
    for name in space.keys() & parameters.keys():
        _check_type(space[name], parameters[name])
    if function is None:
        loaded = load_task(reference, {name: as_text(value) for name, value in needed.items()})
    else:
        loaded = LoadedTask(call_make_task(function, needed), None, {})
    task = loaded.task
    stopping = EarlyStopping.of(task.monitor, task.goal, task.roles.validation is not None)
    whole = {name for name, parameter in parameters.items() if _is_int(parameter)} | (
        set(TASK_FIELDS) - parameters.keys()
    )
    space = check_names(space, list(parameters), whole)
    record = StudyRecord(
        id=uuid.uuid4().hex,
        name=task.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        source=loaded.record,
        space=space,
        arguments=list(parameters),
        figure=stopping.figure,
        is_minimized=stopping.is_minimized,
        epochs=largest(space, "epochs", task.epochs),
        rungs=[],
        task_epochs=task.epochs,
        task_seed=task.seed,
        versions=study_versions(),
        **settings,
    )
    return Description(record, loaded.files, installed_modules(known), builtin.reads)


def installed_modules(known: Collection[str]) -> list[str]:
    """Returns the imported modules of installed packages without those that are known, in the order of their import."""
    own = str(Path(__file__).parents[1])
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in known
        and ((file := getattr(module, "__file__", None) or "").startswith(own) or is_installed(file))
    ]


def _is_int(parameter: Parameter) -> bool:
    has_type = parameter.annotation is not parameter.empty
    return parameter.annotation in (int, "int") if has_type else type(parameter.default) is int


def _check_type(parameter: ParameterRecord, argument: Parameter) -> None:
    """Raises StudyError if the argument of `task(...)` takes no such values."""
    if not parameter.choices and {argument.annotation, type(argument.default)} & {str, bool}:
        raise StudyError(f"{parameter.place}: {argument.name} takes no numbers", expected="a choice such as a,b")
    for value in parameter.choices or ([] if _is_int(argument) else [parameter.low, parameter.high]):
        try:
            parse_argument(as_text(value), argument)
        except TaskError as error:
            raise StudyError(f"{parameter.place}: {error.given}", expected=error.expected, fix=error.fix) from error


def call_make_task(function: Any, arguments: Mapping[str, Value]) -> Task:
    task = call_user_code("make_task", lambda: function(**arguments))
    if not isinstance(task, Task):
        raise TaskError(f"make_task returned {type_name(task)}", expected="a hotloop.Task", fix="return the Task")
    return task


def train(
    folder: str,
    study: StudyRecord,
    make_task: bytes | None,
    number: int,
    repeat: int,
    params: Mapping[str, Value],
    run: str,
    pause_after: int | None,
) -> TrialProgress | HotloopError:
    """Trains a run of a trial, from its last checkpoint if there is one, and returns its state, or an error of the study.

    A missing device is an error of the study: the trials go on where the device is.

    Args:
        folder: of the study.
        params: values of the hyper-parameters.
        run: the run's folder.
        pause_after: the epoch after which to stop; None for the end of training.
    """
    began, error, outcome = time.monotonic(), "", None
    path, lock = Path(run), FileLock(Path(folder) / "records" / f"{number:04d}-{repeat + 1}.lock")
    try:
        if "device" in study.axes:
            check_device(study.axes["device"])
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOCK_S)  # a process of a killed study may train the trial for some seconds
    except DeviceError as failure:
        return failure
    except Timeout:
        return StudyError(f"{run} is being trained by another process", fix="stop that process, or wait for it")
    with lock:
        try:
            outcome = _train(Path(folder), study, make_task, repeat, params, path, pause_after)
        except (Exception, SystemExit) as failure:
            traceback.print_exc()
            error = error_line(failure)
    return trial_progress(study, number, repeat, path, outcome, error, time.monotonic() - began)


def trial_progress(
    study: StudyRecord, number: int, repeat: int, path: Path, outcome: RunOutcome | None, error: str, seconds: float
) -> TrialProgress:
    """Returns the state of a run of a trial from its folder and the end of its training."""
    rows: list[dict[str, Any]] = []
    inexact = list[str]()
    if is_run(path):
        handle = Run.open(path)
        rows, inexact = handle.epochs, handle.record.facts.inexact
        if not handle.record.facts.exact:
            inexact = inexact or ["the data has an order of its own"]
    speed = rows[-1].get("samples_per_s") if rows else None
    values = [row[study.figure] for row in rows if row.get(study.figure) is not None]
    if len(values) < len(rows):
        error = error or f"the run has no {study.figure.replace('_', ' ')}, by which the study compares its trials"
    if outcome is not None and outcome.is_finished and not any(map(math.isfinite, values)):
        error = error or f"{study.figure} is {values[-1] if values else 'missing'} after each epoch"
    return TrialProgress(
        number=number,
        repeat=repeat,
        epochs=len(rows),
        values=values,
        is_finished=bool(error) or (outcome is not None and outcome.is_finished),
        final=None if outcome is None else outcome.final,
        error=error,
        inexact=[*inexact, *version_changes(study.versions)],
        seconds=seconds,
        step_ms=1e3 * handle.record.facts.batch_size / speed if speed else None,
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def error_line(error: BaseException) -> str:
    if isinstance(error, HotloopError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"the Task called exit({error.code!r})"
    return f"{'out of memory: ' if is_out_of_memory(error) else ''}{describe_error(error)}"


def _train(
    folder: Path,
    study: StudyRecord,
    make_task: bytes | None,
    repeat: int,
    params: Mapping[str, Value],
    path: Path,
    pause_after: int | None,
) -> RunOutcome:
    loaded, overrides = load_trial(folder, study, make_task, repeat, params)
    context = RunContext(
        loaded,
        overrides=overrides,
        reporter=Reporter(lambda line: print(line, flush=True)),
        pause_after_epoch=math.inf if pause_after is None else pause_after,
        has_reports=False,
    )
    if is_run(path):
        return resume_run(context, path)[1]
    axes = {"threads": 1, **study.axes}
    context = replace(context, checkpoint_every="auto")
    if study.plan not in (RULES_PLAN, AUTO):
        named = folder / study.plan if study.plan.endswith(".toml") else study.plan
        return start_run(replace(context, plan=named, axes=axes), path)[1]
    base = PlanRequest.from_value(AUTO, axes).plan
    context = context.with_overrides()
    ways: list[tuple[Plan, Program | None]] = [(plan, None) for plan in rules_plans(context.task, base)]
    if study.plan == AUTO:
        ways = [*_plan_of_shape(folder, study, context, base), *ways]
    for plan, program in ways:
        try:
            return start_run(replace(context, plan=plan, program=program), path)[1]
        except (PlanError, MemoryExhausted) as error:
            if isinstance(error, DeviceError) or plan is ways[-1][0] or is_run(path):
                raise
            print(f"{plan.brief()}: {error.given}", flush=True)
    raise AssertionError("the rules always name the baseline")


def load_trial(
    folder: Path, study: StudyRecord, make_task: bytes | None, repeat: int, params: Mapping[str, Value]
) -> tuple[LoadedTask, dict[str, Any]]:
    """Returns a trial's Task, and the fields of the Task to change; the repeats have the seeds that follow the first."""
    if repeat:
        params = {**params, "seed": int(params.get("seed", study.task_seed) or 0) + repeat}
    arguments = {name: value for name, value in params.items() if name in study.arguments}
    overrides = {name: value for name, value in params.items() if name not in study.arguments}
    if study.source is None:
        assert make_task is not None
        return LoadedTask(call_make_task(cloudpickle.loads(make_task), arguments), None, {}), overrides
    texts = {**study.source.parameters, **{name: as_text(value) for name, value in arguments.items()}}
    source = study.source.model_copy(update={"parameters": texts})
    task = load_from_run(folder / "source", source)
    task = replace(task, name=study.name) if task.name == "task" else task
    return LoadedTask(task, source, files_of(folder / "source")), overrides


def _plan_of_shape(
    folder: Path, study: StudyRecord, context: RunContext, base: Plan
) -> list[tuple[Plan, Program | None]]:
    """Returns the plan of the trial's shape, with its Program if the plan is compiled; empty if the trial can't use it."""
    found = plan_of_shape(folder / "plans", context.source, base, expected_trials(study))
    if found.plan.compile == "none":
        return [(found.plan, None)]
    try:
        return [(found.plan, found.lower(context.task, feasibility_facts(context.task, base)[0].steps, context.say))]
    except (PlanError, MemoryExhausted) as error:
        if isinstance(error, DeviceError):
            raise
        print(f"{found.plan.brief()}: {error.given}", flush=True)
        return []


def rules_plans(task: Task, base: Plan) -> list[Plan]:
    return [choice.plan for choice in list_options(task, base).uncompiled]


# --- plans of a study with `--plan auto`: the fastest proven plan of each shape of network, found once


@dataclass(frozen=True)
class ShapePlan:
    """The plan of a shape.

    Attributes:
        pays_after: steps of one trial from which compiling the plan for this trial alone pays; None if unknown.
    """

    plan: Plan
    pays_after: int | None

    def lower(self, task: Task, steps: int | None, say: Say) -> Program:
        """Lowers the plan for one trial. A number that is a constant of the compiled step, such as the rate of a dropout,
        makes another package: it is compiled only if that pays in this trial.

        Raises:
            PlanError: the trial needs a package of its own that wouldn't pay, or the plan can't be run.
        """
        may_build = steps is None or self.pays_after is None or steps > self.pays_after
        return lower(task, self.plan, say, package=PackageUse(may_build=may_build))


def plan_of_shape(folder: Path, loaded: LoadedTask, base: Plan, trials: int) -> ShapePlan:
    """Returns the plan for trials that differ in numbers alone; the first trial of a shape finds the plan.

    Args:
        folder: where the study stores plans.
        base: axes that are set.
        trials: expected number of trials of the shape: the plan has to pay in all of them together.
    """
    path = folder / f"{shape_key(loaded.task, base)}.toml"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "search.lock"):  # one search at a time: two would change each other's times
            if not path.is_file():
                _find_plan(path, loaded, base, trials)
    return ShapePlan(Plan.read(path), json.loads(path.with_suffix(".json").read_text())["pays_after"])


def _find_plan(path: Path, loaded: LoadedTask, base: Plan, trials: int) -> None:
    from hotloop.tuning.tune import cached_or_tuned_plan

    print(f"finding the plan for {path.stem}", flush=True)
    together = {"epochs": loaded.task.epochs * trials}
    searches: list[Verdict] = []
    request = PlanRequest(base, is_auto=True)
    plan, reason = cached_or_tuned_plan(loaded, request, overrides=together, searches=searches)
    print(reason, flush=True)
    winners = [one.plan(one.winner) for one in searches if one.winner]
    write_atomic(path.with_suffix(".json"), json.dumps({"pays_after": winners[-1].pays_after if winners else None}))
    write_atomic(path, (plan or base).to_toml())


def expected_trials(study: StudyRecord) -> int:
    """Returns the number of trials of one shape if each choice, and each whole number of a range, makes another shape.

    A study that prunes trains half of its trials' epochs.
    """
    shapes = math.prod(_different_values(one) for one in study.space.values())
    return max(1, study.trials * study.repeats // (shapes * (2 if study.rungs else 1)))


def _different_values(parameter: ParameterRecord) -> int:
    if parameter.low is None or parameter.high is None:
        return max(1, len(parameter.choices))
    return int((parameter.high - parameter.low) // (parameter.step or 1)) + 1 if parameter.is_int else 1


def shape_key(task: Task, base: Plan) -> str:
    """Returns a hash of what a plan's speed depends on: shapes, layers and optimizers, without their numbers."""
    facts, _ = feasibility_facts(task, base)
    model = task.build_model()
    optimizers = [type(one).__name__ for one in member_optimizers(task.build_optimizer(model))]
    tensors = [[name, list(value.shape), str(value.dtype)] for name, value in model.state_dict(keep_vars=True).items()]
    layers = [[name, type(module).__qualname__] for name, module in model.named_modules()]
    sizes = [facts.batch_size, facts.inputs, facts.drops, facts.one_operation, facts.steps is None]
    text = json.dumps([tensors, layers, optimizers, sizes, base.brief()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
