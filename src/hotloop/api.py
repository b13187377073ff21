"""The few public functions: they wire the stages together."""

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
from hotloop.core.feasibility.forecast import PlanForecast
from hotloop.core.hardware.devices import check_device, resolve_device
from hotloop.core.hardware.probe import measure_hardware
from hotloop.core.hardware.versions import result_versions
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.training import Evaluation, ExportRecord
from hotloop.core.reporter import Report
from hotloop.core.terminal import Terminal
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
from hotloop.report.progress import TrainingDisplay, summary
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask
from hotloop.training.run import FollowerRun, Run
from hotloop.training.start import resume_run, start_run, task_of_run
from hotloop.tuning.auto.recall import forecast_from_cache
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
    """Trains `task`, and returns its run.

    Args:
        run: a new folder for the run; default `runs/<name>-<date>-<time>`.
        resume: go on with the run in that folder, exactly where it stopped.
        plan: how to run it: a `Plan`, a TOML file, `baseline` (eager), `arrays`, or `auto`, which is the default:
            what `tune` found and remembered for a Task in a file, else what the rules say. To resume with, the run's
            own. One for several ranks starts them as forks of this process, see docs/parallel.md.
        device: where, whatever the plan says, such as `cpu` or `cuda`; default this machine's accelerator, else the CPU.
        stop_after: stop cleanly after this time, such as `11h`.
        checkpoint_every: `auto` (at most 1 % of the time), a number of steps, or a time such as `5m`.
        callbacks: called with a `View` after each event, after those of the Task; see `hotloop.view.Callback`.
        progress: show a progress bar and a line per epoch.
        rank_timeout: how long ranks wait for each other in training, such as `5m`; default 60 s, or 20 times the longest
            step if that is longer. Then the run ends with a TrainingError that says where each rank is.

    Returns:
        The run: `epochs` and `final` hold its figures, `path` its folder, and `reason` says why training stopped, such as
        `finished`, or `SIGINT` where Ctrl-C saved and stopped it.
    """
    if not isinstance(task, Task):
        raise TaskError(f"fit got {type_name(task)}", expected="a hotloop.Task", fix="see hotloop.Task's help")
    path, axes = Path(run) if run else None, {} if device is None else {"device": device}
    ranked = plan_to_launch(plan, axes, path if resume else None)
    display = _ArgumentDisplay(_console(in_forks=ranked is not None) if progress else Terminal(quiet=True))
    context = RunContext(
        LoadedTask(task, None, {}),
        plan=plan,
        axes=axes,
        stop_after=stop_after,
        checkpoint_every=None if resume else checkpoint_every,
        rank_timeout=rank_timeout,
        callbacks=[*callbacks, display],
        reporter=display.reporter,
    )
    if resume and run is None:
        raise RunError("resume=True without a run", expected="run= the folder to go on with")

    def train() -> Run:
        try:
            handle, ended = resume_run(context, path) if resume and path else start_run(context, path)
        finally:
            display.close()
        for line in [] if isinstance(handle, FollowerRun) else summary(handle.path, handle.plan.brief(), ended.final):
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
    """A display whose lines name Python arguments in place of the command's flags."""

    def say(self, line: str) -> None:
        super().say(name_arguments(line))


def _console(in_forks: bool) -> Terminal:
    """Where a person looks; what a fork shows in a notebook as widgets gets lost, so lines have to do there."""
    here = Terminal()
    plain = in_forks and here.is_jupyter
    return Terminal(force_jupyter=False, force_terminal=False) if plain else here


def plan_loaded_task(
    loaded: LoadedTask, wanted: PlanRequest, overrides: Mapping[str, Any] | None = None, say: Report = lambda line: None
) -> PlanForecast:
    """What `--plan auto` makes of a loaded Task on this machine, by the rules and by what races found before."""
    return forecast_from_cache(
        LoadedTask(override_fields(loaded.task, overrides), loaded.record, loaded.files), wanted, say
    )


def devices(device: str | None = None, *, refresh: bool = False) -> Hardware:
    """This machine's devices: memory, precisions, measured speed; and its cores, compiler and versions.

    Args:
        device: this one alone, such as `cpu` or `cuda:0`; default all of them.
        refresh: measure anew, in place of what was measured before.

    Raises:
        DeviceError: there is no such device.
    """
    return measure_hardware(device, refresh=refresh)


def choose_plan(task: Task, *, plan: Plan | None = None, device: str | None = None) -> PlanForecast:
    """The plan that `fit` would take for `task` here by itself, and why; nothing is trained, and nothing is measured.

    Args:
        plan: axes that are set already; the others are chosen.
        device: where, whatever the plan says.

    Returns:
        What `hotloop plan` shows; `fit(task, plan=...)` takes its `.plan`.

    Raises:
        PlanError: the axes can't be run here.
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
    say: Report = warnings.warn,
) -> nn.Module:
    """The trained model of a run, in evaluation mode.

    Args:
        run: a run, or its folder.
        task: the Task, for a run that was trained from Python in another process.
        device: where to put it.
        weights: `best`, by validation (without it, the last), or `last`. Averaged weights, if the Task has them.
        trust: run the code in the folder of a run that you didn't start, now and from now on; see SECURITY.md.
        say: is told of a damaged checkpoint that was passed over.

    Raises:
        RunError: no run, or it has no good checkpoint.
        CheckpointError: the weights are another model's.
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
    say: Report = warnings.warn,
    progress: Progress | None = None,
) -> np.ndarray | dict[str, np.ndarray]:
    """What the trained model of a run says of new inputs.

    Args:
        x: an array or tensor (N, ...) of raw inputs, as those of the training data before the Task's `prepare`; a tuple
            of several, or a dict of them where the Task's data is one; or the path of a .npy or .npz file with them.
        device: where to compute; default this machine's accelerator, else the CPU.
        task, weights, trust, say: see `load_model`.
        progress: is told `(samples done, of how many)`.

    Returns:
        The model's output, or that of the Task's `predict`: (N, ...), floating-point numbers as float32. Of an output
        with `logits` these alone; of other dicts and tuples a dict of arrays.

    Raises:
        DataError: x is empty, holds NaN, or is nothing that the model can take.
    """
    handle = _open_run(run)
    owner = task_of_run(handle, task, trust=trust, say=say)
    place = check_device(resolve_device(Plan(), device).device)
    model = trained_model(owner, choose_weights(handle, weights, say).state, place)
    return predict_arrays(owner, model, x, handle.record.facts, place, progress)


def evaluate(
    run: Run | str | Path,
    *,
    on: str | None = None,
    data: Any = None,
    task: Task | None = None,
    device: str | None = None,
    weights: WeightsChoice = "best",
    trust: bool = False,
    say: Report = warnings.warn,
    progress: Progress | None = None,
) -> Evaluation:
    """Loss and metrics of a run's trained model; for a classification also its confusions and worst mistakes.

    Computed eagerly under torch's settings in this process, whatever the plan that the run was trained with.

    Args:
        on: `test`, `validation` or `train`; default `test`, or `validation` without test data. Choosing a network by
            its figures on test data makes them too good to be true: choose by `validation`.
        data: data of one's own instead, raw: `(x, y)`, a data set or a DataLoader.
        device, task, weights, trust, say, progress: see `predict`.

    Raises:
        DataError: there is no such data.
    """
    handle = _open_run(run)
    plan = resolve_device(Plan(workers=handle.plan.workers), device)
    chosen = choose_weights(handle, weights, say)
    program = lower(task_of_run(handle, task, trust=trust, say=say), plan)
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
    weights: WeightsChoice = "best",
    prepare: bool = True,
    batch_size: int | None = None,
    inputs: Any = None,
    trust: bool = False,
    say: Report = warnings.warn,
) -> ExportRecord:
    """Writes the trained model of a run to a file for use without hotloop.

    The file is read back and run on real samples, and takes its name only if it answers as the model does.

    Args:
        to: its suffix tells the format: `.pt2` (torch.export) and `.onnx` run by themselves, and take what `predict`
            takes; `.pt` and `.safetensors` hold the `state_dict`.
        prepare: put the Task's `prepare` into a `.pt2` or `.onnx` file; otherwise it takes prepared inputs.
        batch_size: the only number of samples that a `.pt2` or `.onnx` file takes; default any.
        inputs: samples to try the file on, as `predict` takes them; default those of the training data, which a
            generator that takes noise can't use.
        task, weights, trust, say: see `load_model`.

    Raises:
        ExportError: an unknown format, a model that can't be captured, or a file that answers differently.
    """
    handle = _open_run(run)
    owner = task_of_run(handle, task, trust=trust, say=say)
    chosen = choose_weights(handle, weights, say)
    model = trained_model(owner, chosen.state, torch.device("cpu"))
    options: dict[str, Any] = dict(prepare=prepare, batch_size=batch_size, inputs=inputs, versions=result_versions())
    return export_weights(owner, model, chosen, Path(to), run=str(handle.path), **options)


def _open_run(run: Run | str | Path) -> Run:
    return run if isinstance(run, Run) else Run.open(Path(run))
