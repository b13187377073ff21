"""The few public functions: they wire the stages together."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from hotloop.answers import evaluate_weights
from hotloop.choosing import Considered, consider, lowered, placed
from hotloop.continuing import check_overrides
from hotloop.data.feed import peek
from hotloop.data.tree import inputs_of
from hotloop.errors import HotloopError, RunError, TaskError
from hotloop.exporting import export_weights
from hotloop.inference import Progress, Weights, choose_weights, trained_model
from hotloop.inference import predict as answers_to
from hotloop.loop import Ended, train_loop
from hotloop.lowering import Program, lower
from hotloop.lowering.facts import facts_of
from hotloop.lowering.telling import During, Say
from hotloop.pacing import Cadence, seconds
from hotloop.plan import Plan
from hotloop.probe import check_device
from hotloop.records import Evaluation, Exported, RunRecord
from hotloop.remembering import lowered_by_memory
from hotloop.report import tensorboard
from hotloop.report.curves import draw_curves
from hotloop.report.progress import Display
from hotloop.run import Run
from hotloop.setting import versions
from hotloop.steering import Steering
from hotloop.task import Task, overridden
from hotloop.taskfile import Loaded, load_from_run
from hotloop.view import Callback
from hotloop.wanted import Wanted


def fit(
    task: Task,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    plan: Plan | str | Path | None = None,
    device: str | None = None,
    stop_after: str | None = None,
    checkpoint_every: str = "auto",
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> Run:
    """Trains `task`, and returns its run.

    Args:
        run: a new folder for the run; default `runs/<name>-<date>-<time>`.
        resume: go on with the run in that folder, exactly where it stopped.
        plan: how to run it: a `Plan`, a TOML file, `baseline` (eager fp32), `arrays`, or `auto`, which is the default:
            what `tune` found and remembered for a Task in a file, else what the rules say. To resume with, the run's
            own.
        device: where, whatever the plan says, such as `cpu` or `cuda`; default this machine's accelerator, else the CPU.
        stop_after: stop cleanly after this time, such as `11h`.
        checkpoint_every: `auto` (at most 1 % of the time), a number of steps, or a time such as `5m`.
        callbacks: called with a `View` after each event, after those of the Task.
        progress: show a progress bar and a line per epoch.

    Returns:
        The run: `epochs` and `final` hold its figures, `path` its folder.
    """
    display = Display(Console(stderr=True) if progress else Console(quiet=True))
    common: dict[str, Any] = dict(
        plan=plan,
        axes={} if device is None else {"device": device},
        stop_after=stop_after,
        callbacks=[*callbacks, display],
        say=display.say,
        during=display.during,
    )
    if not resume:
        path = Path(run) if run else None
        return start(Loaded(task, None, {}), run=path, checkpoint_every=checkpoint_every, **common)[0]
    if run is None:
        raise RunError("resume=True without a run", expected="run= the folder to go on with")
    return go_on(Path(run), task=task, **common)[0]


def start(
    loaded: Loaded,
    *,
    run: Path | None = None,
    plan: Plan | str | Path | None = None,
    axes: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stop_after: str | None = None,
    checkpoint_every: str = "auto",
    callbacks: Sequence[Callback] = (),
    say: Say = lambda line: None,
    during: During | None = None,
) -> tuple[Run, Ended]:
    """Starts a new run of a loaded Task; `axes` are set on top of the plan, and see `lower` for `during`."""
    began = time.monotonic()
    task = overridden(loaded.task, overrides)
    wanted = Wanted.or_auto(plan, axes)
    Cadence.parse(checkpoint_every)
    stop_after_s = None if stop_after is None else seconds(stop_after, "stop-after")
    path = run or _free(Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    Run.check_new(path)
    Steering.of(
        task.monitor, task.goal, task.roles.validation is not None
    )  # what can't be watched shows before an hour
    program = lowered_by_memory(loaded, task, wanted, say, during)
    as_given = replace(program.parts, task=task, roles=task.roles)  # facts are of the Task, not of how it is run
    record = RunRecord(
        name=task.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        source=loaded.record,
        overrides=dict(overrides or {}),
        facts=facts_of(as_given, loaded.record.digest if loaded.record else ""),
        classes=list(task.classes or task.roles.classes),
        note=task.roles.note,
        checkpoint_every=checkpoint_every,
        versions=versions(),
    )
    handle = Run.create(path, record, program.parts.plan, loaded.files)
    if task.roles.note:
        say(task.roles.note)
    stop_after_s = None if stop_after_s is None else stop_after_s - (time.monotonic() - began)
    return handle, _train(handle, task, lambda: program, False, stop_after_s, callbacks, say)


def go_on(
    path: Path,
    *,
    task: Task | None = None,
    plan: Plan | str | Path | None = None,
    axes: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    stop_after: str | None = None,
    checkpoint_every: str | None = None,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda line: None,
    during: During | None = None,
) -> tuple[Run, Ended]:
    """Goes on with a run where it was stopped or killed; under another plan from here on, if there is one."""
    handle = Run.open(path)
    wanted = Wanted.of(handle.plan if plan is None else plan, axes)
    if checkpoint_every is not None:
        Cadence.parse(checkpoint_every)
        handle.record = handle.record.model_copy(update={"checkpoint_every": checkpoint_every})
    stop_after_s = None if stop_after is None else seconds(stop_after, "stop-after")
    before = task_of(handle, task)
    check_overrides(handle.record.facts, before, overrides or {})
    handle.record = handle.record.model_copy(update={"overrides": {**handle.record.overrides, **(overrides or {})}})
    task = overridden(before, overrides)
    if (final := handle.final) is not None and len(handle.epochs) >= _last_epoch(handle, task, final):
        say(f"{path} is finished already; --epochs with a larger number goes on with it")
        return handle, Ended("finished", True, [], final)
    if task.schedule is not None and task.epochs != before.epochs:
        say(f"the learning-rate schedule was laid out for {before.epochs} epochs: look at what it does after them")
    then = handle.record.versions
    if other := [
        f"{name} {then[name]} then, {now} now" for name, now in versions().items() if then.get(name, now) != now
    ]:
        say(f"{', '.join(other)}: the result may differ in its last bits")
    first = partial(lowered, task, wanted, say, during)
    return handle, _train(handle, task, first, True, stop_after_s, callbacks, say)


def considered(loaded: Loaded, base: Plan, overrides: Mapping[str, Any] | None = None) -> Considered:
    """What `--plan auto` makes of a loaded Task on this machine; the axes set in making `base` are kept."""
    return consider(overridden(loaded.task, overrides), base)


def _last_epoch(handle: Run, task: Task, final: dict[str, Any]) -> int:
    """The epoch at which the run is over: an early stop counts as the end."""
    return task.epochs if final["reason"] == "finished" else len(handle.epochs)


def _train(
    handle: Run,
    task: Task,
    first: Callable[[], Program],
    resume: bool,
    stop_after_s: float | None,
    callbacks: Sequence[Callback],
    say: Say,
) -> Ended:
    """Trains in the run's folder, beginning with the Program that `first` makes."""
    handle.lock()
    before, events = Run.open(handle.path), len(handle.journal())
    try:
        ready = [first()]
        plan = ready[0].parts.plan

        def relower() -> Program:
            return ready.pop() if ready else lower(task, plan)

        changed = {name: getattr(handle.record, name) for name in ("overrides", "checkpoint_every")}
        handle.keep(plan=plan, record=before.record.model_copy(update=changed))
        handle.task = task
        return train_loop(
            relower,
            handle,
            resume=resume,
            stop_after_s=stop_after_s,
            callbacks=[*task.callbacks, draw_curves, *_tensorboard(task, say), *callbacks],
            say=say,
        )
    except (HotloopError, KeyboardInterrupt):
        if not resume:
            handle.discard()
        elif len(handle.journal()) == events:  # what couldn't even begin leaves the run as it was
            handle.keep(plan=before.plan, record=before.record)
        raise
    finally:
        handle.unlock()


def _tensorboard(task: Task, say: Say) -> list[Callback]:
    """A writer for TensorBoard, if it is installed; the graph is drawn for models that take a batch's inputs."""
    if not tensorboard.installed():
        return []
    graph = (lambda: (task.build_model(), inputs_of(peek(task.roles)))) if task.loss is not None else None
    return [tensorboard.TensorBoard(graph, say)]


def load_model(
    run: Run | str | Path,
    *,
    task: Task | None = None,
    device: str = "cpu",
    weights: Weights = "best",
    say: Say = warnings.warn,
) -> nn.Module:
    """The trained model of a run, in evaluation mode.

    Args:
        run: a run, or its folder.
        task: the Task, for a run that was trained from Python in another process.
        device: where to put it.
        weights: `best`, by validation (without it, the last), or `last`. Averaged weights, if the Task has them.
        say: is told of a damaged checkpoint that was passed over.

    Raises:
        RunError: no run, or it has no good checkpoint.
        CheckpointError: the weights are another model's.
    """
    handle = _opened(run)
    state = choose_weights(handle, weights, say).state
    return trained_model(task_of(handle, task), state, check_device(device))


def predict(
    run: Run | str | Path,
    x: Any,
    *,
    task: Task | None = None,
    device: str | None = None,
    weights: Weights = "best",
    say: Say = warnings.warn,
    progress: Progress | None = None,
) -> np.ndarray | dict[str, np.ndarray]:
    """What the trained model of a run says of new inputs.

    Args:
        x: an array or tensor (N, ...) of raw inputs, as those of the training data before the Task's `prepare`; a tuple
            of several, or a dict of them where the Task's data is one; or the path of a .npy or .npz file with them.
        device: where to compute; default this machine's accelerator, else the CPU.
        task, weights, say: see `load_model`.
        progress: is told `(samples done, of how many)`.

    Returns:
        The model's output, or that of the Task's `predict`: (N, ...), floating-point numbers as float32. Of an output
        with `logits` these alone; of other dicts and tuples a dict of arrays.

    Raises:
        DataError: x is empty, holds NaN, or is nothing that the model can take.
    """
    handle = _opened(run)
    owner = task_of(handle, task)
    place = check_device(placed(Plan(), device).device)
    model = trained_model(owner, choose_weights(handle, weights, say).state, place)
    return answers_to(owner, model, x, handle.record.facts, place, progress)


def evaluate(
    run: Run | str | Path,
    *,
    on: str | None = None,
    data: Any = None,
    task: Task | None = None,
    device: str | None = None,
    weights: Weights = "best",
    say: Say = warnings.warn,
    progress: Progress | None = None,
) -> Evaluation:
    """Loss and metrics of a run's trained model; for a classification also its confusions and worst mistakes.

    Computed in eager fp32, whatever the plan that the run was trained with.

    Args:
        on: `test`, `validation` or `train`; default `test`, or `validation` without test data. Choosing a network by
            its figures on test data makes them too good to be true: choose by `validation`.
        data: data of one's own instead, raw: `(x, y)`, a data set or a DataLoader.
        device, task, weights, say, progress: see `predict`.

    Raises:
        DataError: there is no such data.
    """
    handle = _opened(run)
    plan = placed(Plan(workers=handle.plan.workers), device)
    chosen = choose_weights(handle, weights, say)
    program = lower(task_of(handle, task), plan)
    try:
        return evaluate_weights(
            program, chosen, run=str(handle.path), on=on, data=data, classes=handle.record.classes, progress=progress
        )
    finally:
        program.close()


def export(
    run: Run | str | Path,
    to: str | Path,
    *,
    task: Task | None = None,
    weights: Weights = "best",
    prepare: bool = True,
    batch_size: int | None = None,
    say: Say = warnings.warn,
) -> Exported:
    """Writes the trained model of a run to a file for use without hotloop.

    The file is read back and run on real samples, and takes its name only if it answers as the model does.

    Args:
        to: its suffix tells the format: `.pt2` (torch.export) and `.onnx` run by themselves, and take what `predict`
            takes; `.pt` and `.safetensors` hold the `state_dict`.
        prepare: put the Task's `prepare` into a `.pt2` or `.onnx` file; otherwise it takes prepared inputs.
        batch_size: the only number of samples that a `.pt2` or `.onnx` file takes; default any.
        task, weights, say: see `load_model`.

    Raises:
        ExportError: an unknown format, a model that can't be captured, or a file that answers differently.
    """
    handle = _opened(run)
    owner = task_of(handle, task)
    chosen = choose_weights(handle, weights, say)
    model = trained_model(owner, chosen.state, torch.device("cpu"))
    options: dict[str, Any] = dict(prepare=prepare, batch_size=batch_size, versions=versions())
    return export_weights(owner, model, chosen, Path(to), run=str(handle.path), **options)


def _opened(run: Run | str | Path) -> Run:
    return run if isinstance(run, Run) else Run.open(Path(run))


def _free(path: Path) -> Path:
    """`path`, or where that is taken `path` with a number."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def task_of(run: Run, task: Task | None = None) -> Task:
    """The Task of a run: the one given, the one it was just trained with, or the copy of its source in the folder."""
    task = task or run.task
    if task is None:
        if run.record.source is None:
            raise TaskError(
                f"{run.path} was trained from Python, so the folder has no file with its Task",
                expected="the Task",
                fix="pass it from Python: hotloop.fit(task, run=..., resume=True), hotloop.predict(..., task=task)",
            )
        task = load_from_run(run.source, run.record.source)
    return overridden(task, run.record.overrides)
