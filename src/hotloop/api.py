"""The public functions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hotloop.core.argument_names import name_arguments
from hotloop.core.callback import Callback
from hotloop.core.feasibility import PlanForecast
from hotloop.core.hardware.devices import check_device, resolve_device
from hotloop.core.hardware.machine import result_versions
from hotloop.core.hardware.probe import measure_hardware
from hotloop.core.plan_request import AUTO, PlanRequest, plan_origin, replayed_run
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.training import Evaluation, ExportRecord
from hotloop.core.reporter import Say
from hotloop.core.terminal import Terminal
from hotloop.data.readers.stored_reader import reader_from_json
from hotloop.distributed.fork_safety import check_cuda
from hotloop.distributed.join import plan_to_launch
from hotloop.distributed.launch import launch, local_rank_count
from hotloop.errors import PlanError, RunError, TaskError, type_name
from hotloop.inference.evaluate import evaluate_weights
from hotloop.inference.export import export_weights
from hotloop.inference.predict import Progress, WeightsChoice, choose_weights, trained_model
from hotloop.inference.predict import predict as predict_arrays
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.profiler.model_summary import summarize_model
from hotloop.report.model_summary import PrintableSummary
from hotloop.report.progress import TrainingDisplay
from hotloop.report.progress import summary as training_summary
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask
from hotloop.training.resume import check_files
from hotloop.training.run import Run
from hotloop.training.start import resume_run, start_run, task_of_run
from hotloop.tuning.auto import forecast_from_cache
from hotloop.tuning.run_context import RunContext


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
    rank_timeout: str | None = None,
) -> Run:
    """Trains a Task, and returns its run.

    Args:
        run: a new folder for the run; default `runs/<name>-<date>-<time>`.
        resume: continue the run in that folder from its last checkpoint.
        plan: a `Plan`, a TOML file, `baseline` (eager), `auto` or `replay:RUN`. By default the result of
            `tune` for a Task in a file, else the choice of the rules. `auto` begins with the same plan and searches for
            a faster one while the run trains, and `replay:RUN` repeats such a run bit by bit. A resumed run keeps its
            own plan by default. Several ranks start as forks of this process, see docs/how-to/ranks.md.
        device: overrides the plan's, such as `cpu` or `cuda`; default this machine's accelerator, else the CPU.
        stop_after: save and stop after this time, such as `11h`.
        checkpoint_every: `auto` (at most 1 % of the time), a number of steps, or a time such as `5m`.
        callbacks: called with a `View` after each event, after the Task's callbacks; see `hotloop.core.callback.Callback`.
        progress: show a progress bar and a line per epoch.
        rank_timeout: how long ranks wait for each other, such as `5m`; default 60 s, or 20 times the longest step if
            that is longer. Then the run ends with a TrainingError that names each rank's position.

    Returns:
        The run: `epochs` and `final` have its figures, `path` is its folder, and `reason` says why training stopped,
            such as
        `finished`, or `SIGINT` after Ctrl-C.
    """
    if not isinstance(task, Task):
        raise TaskError(f"fit got {type_name(task)}", expected="a hotloop.Task", fix="see hotloop.Task's help")
    path, axes = Path(run) if run else None, {} if device is None else {"device": device}
    if (replay := replayed_run(plan, axes)) is not None:
        plan = None
    ranked = plan_to_launch(plan, axes, path if resume else None)
    display = _ArgumentDisplay(_console(in_forks=ranked is not None) if progress else Terminal(quiet=True))
    context = RunContext(
        LoadedTask(task, None, {}),
        plan=plan,
        axes=axes,
        is_live=plan == AUTO,
        replay=replay,
        stop_after=stop_after,
        checkpoint_every=None if resume else checkpoint_every,
        rank_timeout=rank_timeout,
        rehearse="auto",
        callbacks=[*callbacks, display],
        reporter=display.reporter,
    )
    if resume and run is None:
        raise RunError("resume=True without a run", expected="run= with the folder of the run to continue")

    def train() -> Run:
        try:
            handle, ended = resume_run(context, path) if resume and path else start_run(context, path)
        finally:
            display.close()
        brief = handle.plan.brief() + ("" if resume or replay else plan_origin(plan, axes))
        for line in training_summary(handle.path, brief, ended.final) if handle.writes else []:
            display.say(line)
        return handle

    if ranked is None:
        return train()
    if ranked.workforce == "ray":
        raise PlanError(
            f"parallel={ranked.parallel} with workforce=ray in hotloop.fit",
            expected="ranks of this machine; Ray starts those of `hotloop train`, from a file that all machines see",
            fix="use `hotloop train file.py` with this plan, or workforce=processes",
        )
    check_cuda(ranked)
    trained, code = launch(local_rank_count(ranked), train, display.say)
    if not trained or code:
        raise KeyboardInterrupt  # before there was anything to save, or by one that wouldn't wait for it
    handle = Run.open(Path(trained))
    handle.task = task
    return handle


class _ArgumentDisplay(TrainingDisplay):
    """A display whose lines name Python arguments in place of flags."""

    def say(self, line: str) -> None:
        super().say(name_arguments(line))


def _console(in_forks: bool) -> Terminal:
    """Returns the terminal; forks can't show a notebook's widgets, so their output is plain lines."""
    here = Terminal()
    plain = in_forks and here.is_jupyter
    return Terminal(force_jupyter=False, force_terminal=False) if plain else here


def plan_loaded_task(
    loaded: LoadedTask, wanted: PlanRequest, overrides: Mapping[str, Any] | None = None, say: Say = lambda line: None
) -> PlanForecast:
    """Returns the choice of `--plan auto` for a loaded Task, by rules and earlier races."""
    return forecast_from_cache(
        LoadedTask(override_fields(loaded.task, overrides), loaded.record, loaded.files), wanted, say
    )


def devices(device: str | None = None, *, refresh: bool = False) -> Hardware:
    """Returns this machine's devices with memory, precisions and measured speed, its cores, compiler and versions.

    Args:
        device: the only device to describe, such as `cpu` or `cuda:0`; default all.
        refresh: measure again in spite of the cache.

    Raises:
        DeviceError: the device is missing.
    """
    return measure_hardware(device, refresh=refresh)


def choose_plan(task: Task, *, plan: Plan | None = None, device: str | None = None) -> PlanForecast:
    """Returns the plan that `fit` would choose for the Task here, with reasons, without training or measuring.

    Args:
        plan: fixed axes; the others are chosen.
        device: overrides the plan's.

    Returns:
        The content of `hotloop plan`; `fit(task, plan=...)` takes its `.plan`.

    Raises:
        PlanError: the axes can't run here.
    """
    axes = {} if plan is None else {axis: getattr(plan, axis) for axis in plan.model_fields_set}
    wanted = PlanRequest.from_value("auto", axes if device is None else axes | {"device": device})
    return plan_loaded_task(LoadedTask(task, None, {}), wanted)


def load_model(
    run: Run | str | Path,
    *,
    task: Task | None = None,
    device: str = "cpu",
    weights: WeightsChoice = "best",
    trust: bool = False,
    say: Say = warnings.warn,
) -> nn.Module:
    """Returns the trained model of a run, in evaluation mode.

    Args:
        run: a run, or its folder.
        task: the Task, for a run that was trained from Python in another process.
        device: the model's device.
        weights: `best` by validation (without validation data the last), or `last`; averaged weights if the Task has
            them.
        trust: trust the code in a run folder of another user, now and later; see SECURITY.md.
        say: reports damaged checkpoints.

    Raises:
        RunError: no run, or no undamaged checkpoint.
        CheckpointError: the weights belong to another model.
    """
    handle = _open_run(run)
    state = choose_weights(handle, weights, say).state
    return trained_model(task_of_run(handle, task, trust=trust, say=say), state, check_device(device))


def predict(
    run: Run | str | Path,
    x: Any,
    *,
    task: Task | None = None,
    device: str | None = None,
    weights: WeightsChoice = "best",
    trust: bool = False,
    say: Say = warnings.warn,
    progress: Progress | None = None,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the trained model's output for new inputs.

    Args:
        x: raw inputs (N, ...) like the training data's before the Task's `prepare`: an array or tensor; a tuple of
            several; a dict for a Task with a dict of data; or the path of a .npy or .npz file. For a Task of
            `hotloop.data.image_folder` also the path of an image or of a folder of images, which are sorted by path;
            for one of `hotloop.data.csv` the path of a CSV file with the same columns for inputs.
        device: default this machine's accelerator, else the CPU.
        task, weights, trust, say: see `load_model`.
        progress: receives `(processed samples, total)`.

    Returns:
        The output of the model or of the Task's `predict`: (N, ...), floating-point numbers as float32. Of an output
            with
        `logits` only the logits; of other dicts and tuples a dict of arrays.

    Raises:
        DataError: x is empty, has NaN, or is no input for the model.
    """
    handle = _open_run(run)
    owner = task_of_run(handle, task, trust=trust, say=say)
    place = check_device(resolve_device(Plan(), device).device)
    model = trained_model(owner, choose_weights(handle, weights, say).state, place)
    reader = reader_from_json(handle.record.reader)
    return predict_arrays(owner, model, x, handle.record.facts, place, progress, reader=reader, say=say)


def evaluate(
    run: Run | str | Path,
    *,
    on: str | None = None,
    data: Any = None,
    task: Task | None = None,
    device: str | None = None,
    weights: WeightsChoice = "best",
    trust: bool = False,
    say: Say = warnings.warn,
    progress: Progress | None = None,
) -> Evaluation:
    """Returns loss and metrics of a run's trained model.

    For a classification there are also precision, recall, F1, top-5 accuracy, confusions and the worst mistakes; for a
    regression mean absolute error, root mean squared error, R² and residuals.

    The evaluation is eager, with this process's torch settings, independent of the run's plan.

    Args:
        on: `test`, `validation` or `train`; default `test`, or `validation` without test data. A network that is
            selected by its test figures has biased test figures: select by `validation`.
        data: the caller's raw data instead: `(x, y)`, a data set or a DataLoader.
        device, task, weights, trust, say, progress: see `predict`.

    Raises:
        DataError: the data doesn't exist.
    """
    handle = _open_run(run)
    plan = resolve_device(Plan(workers=handle.plan.workers), device)
    chosen = choose_weights(handle, weights, say)
    owner = task_of_run(handle, task, trust=trust, say=say)
    check_files(handle.record, owner)
    program = lower(owner, plan)
    try:
        return evaluate_weights(
            program,
            chosen,
            run=str(handle.path),
            on=on,
            data=data,
            classes=handle.record.classes,
            targets=handle.record.reader.get("targets", ()),
            progress=progress,
        )
    finally:
        program.close()


def export(
    run: Run | str | Path,
    to: str | Path,
    *,
    task: Task | None = None,
    weights: WeightsChoice = "best",
    prepare: bool = True,
    batch_size: int | None = None,
    inputs: Any = None,
    trust: bool = False,
    say: Say = warnings.warn,
) -> ExportRecord:
    """Writes the trained model of a run to a file for use without hotloop.

    Before the file gets its name, it is read back and its outputs for real samples are compared with the model's.

    Args:
        to: the suffix selects the format: `.pt2` (torch.export) and `.onnx` run without source, and take the inputs of
            `predict`; `.pt` and `.safetensors` contain the `state_dict`.
        prepare: include the Task's `prepare` in a `.pt2` or `.onnx` file; otherwise the file takes prepared inputs.
        batch_size: fixed number of samples of a `.pt2` or `.onnx` file; default any.
        inputs: samples for the check, in the form of `predict`; default the training data's, which don't fit a
            generator that takes noise.
        task, weights, trust, say: see `load_model`.

    Raises:
        ExportError: an unknown format, a model that can't be captured, or a file with other outputs.
    """
    handle = _open_run(run)
    owner = task_of_run(handle, task, trust=trust, say=say)
    check_files(handle.record, owner)
    chosen = choose_weights(handle, weights, say)
    model = trained_model(owner, chosen.state, torch.device("cpu"))
    options: dict[str, Any] = dict(prepare=prepare, batch_size=batch_size, inputs=inputs, versions=result_versions())
    return export_weights(owner, model, chosen, Path(to), run=str(handle.path), **options)


def summary(
    task: Task | Run | str | Path,
    *,
    batch_size: int | None = None,
    trust: bool = False,
    say: Say = warnings.warn,
) -> PrintableSummary:
    """Returns the layers of a Task's model with output shapes, parameters, FLOPs and memory; `print` shows a table.

    One training step of a new model runs on the CPU.

    Args:
        task: a Task; or a run, or its folder.
        batch_size: samples in the batch; default the Task's.
        trust, say: see `load_model`, for a run's folder.

    Raises:
        TaskError, DataError: the Task can't be trained.
        RunError: no run in the folder.
    """
    if not isinstance(task, Task | Run | str | Path):
        raise TaskError(
            f"summary got {type_name(task)}", expected="a hotloop.Task, or a run", fix="see hotloop.Task's help"
        )
    owner = task if isinstance(task, Task) else task_of_run(_open_run(task), trust=trust, say=say)
    if batch_size is not None and batch_size < 1:
        raise TaskError(f"batch_size is {batch_size}", expected="1 or more")
    return summarize_model(owner, batch_size)


def _open_run(run: Run | str | Path) -> Run:
    return run if isinstance(run, Run) else Run.open(Path(run))
