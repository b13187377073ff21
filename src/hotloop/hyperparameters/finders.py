"""Finds a learning rate or a batch size without a study, in trial processes: `hotloop study --find`."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from hotloop.core.files.source_files import split_reference
from hotloop.core.hardware.limits import allowed_cores, free_memory_bytes
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.plan_request import AUTO, PlanRequest
from hotloop.core.records.study import BatchSizeRange, BatchSizeTrial, LearningRateRange, Value
from hotloop.core.reporter import Say
from hotloop.core.terminal import Terminal
from hotloop.errors import HotloopError, StudyError, describe_error, did_you_mean, is_out_of_memory
from hotloop.hyperparameters.space import Space, as_text, parse_space
from hotloop.hyperparameters.trial import call_make_task, rules_plans
from hotloop.hyperparameters.trial_processes import TaskSource, TrialProcesses
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.task import Task, override_fields
from hotloop.task_file import load_task, named_parameters, task_parameters

FINDERS = ("lr", "batch-size")

_SMALLEST = 8
_MEASURE_S = 1.0
_FITTED_SIZES = 3
"""Sizes, the largest ones, from which the memory of the next size is predicted."""


def find_learning_rate(
    make_task: Callable[..., Any] | str | Path,
    arguments: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    page: str | Path | None = None,
    progress: bool = True,
) -> LearningRateRange:
    """Recommends a learning rate by a range test, and confirms the rate by a second run.

    Args:
        make_task: a function that returns the Task, or a Task's file.
        arguments: values of arguments of `make_task`, or of `batch_size`, `epochs` and `seed` of the Task.
        device: default this machine's accelerator, else the CPU.
        page: a new HTML file with the loss over the learning rate.
        progress: print the recommendation.

    Raises:
        StudyError: an argument has several values, or the optimizer has no learning rate.
        TaskError: the Task can't be loaded.
    """
    from hotloop.report.learning_curves import learning_rate_lines  # imports plotly, which the jobs do without

    path = None if page is None else Path(page)
    found = _find_from_python(make_task, "lr", arguments, device, path, progress)
    assert isinstance(found, LearningRateRange)
    for line in learning_rate_lines(found) if progress else ():
        _say(line)
    return found


def find_batch_size(
    make_task: Callable[..., Any] | str | Path,
    arguments: Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    progress: bool = True,
) -> BatchSizeRange:
    """Finds the largest batch size that fits, and the batch size with the best samples/s.

    Each size is tried in a process of its own, so a lack of memory ends that process alone.

    Args:
        make_task: a function that returns the Task, or a Task's file.
        arguments: values of arguments of `make_task`, or of `epochs` and `seed` of the Task.
        device: default this machine's accelerator, else the CPU.
        progress: print a line for each size.

    Raises:
        StudyError: an argument has several values.
        TaskError: the Task can't be trained with the smallest size.
    """
    found = _find_from_python(make_task, "batch-size", arguments, device, None, progress)
    assert isinstance(found, BatchSizeRange)
    return found


def _find_from_python(
    make_task: Any,
    what: str,
    arguments: Mapping[str, Any] | None,
    device: str | None,
    page: Path | None,
    progress: bool,
) -> LearningRateRange | BatchSizeRange:
    axes = {} if device is None else {"device": device}
    say: Say = _say if progress else lambda line: None
    return find(what, TaskSource.from_value(make_task), parse_space(arguments or {}), axes, page, say)


def _say(line: str) -> None:
    Terminal().print(line, markup=False, highlight=False, soft_wrap=True)


def find(
    what: str, source: TaskSource, space: Space, axes: Mapping[str, Any], page: Path | None, say: Say
) -> LearningRateRange | BatchSizeRange:
    """Finds a learning rate (`lr`) or a batch size (`batch-size`).

    Args:
        page: where to write the picture of the learning rates.

    Raises:
        StudyError: an unknown finder, or a parameter with several values.
    """
    if what not in FINDERS:
        raise StudyError(f"no finder {what!r}", expected=" or ".join(FINDERS), fix=did_you_mean(what, FINDERS))
    for parameter in space.values():
        if not parameter.is_fixed:
            raise StudyError(
                f"{parameter.place} for a finder",
                expected="one value",
                fix="write one value, or leave the parameter out",
            )
    values = {name: parameter.choices[0] for name, parameter in space.items()}
    axes = {"threads": len(allowed_cores()), **axes}
    name = Path(split_reference(source.reference)[0]).stem
    with tempfile.TemporaryDirectory() as log, TrialProcesses(Path(log)) as processes:
        if what == "batch-size":
            return measure_batch_sizes(processes, source, values, axes, name, say)
        found = processes.run(
            "hotloop.hyperparameters.range_test:measure_learning_rates",
            "lr.txt",
            source=source,
            values=values,
            axes=axes,
        )
    if isinstance(found, HotloopError):
        raise found
    if found is None:
        raise StudyError("the process of the range test was killed", expected="enough memory for the Task")
    if page is not None:
        from hotloop.report.learning_curves import write_learning_rates

        write_learning_rates(page, found)
    return found


# --- the Task, in a process of the trial server


def load_finder_task(source: TaskSource, values: Mapping[str, Value]) -> tuple[Task, list[str]]:
    """Returns the Task, and the names of its arguments."""
    if source.make_task is None:
        known = task_parameters(source.reference)
        texts = {name: as_text(value) for name, value in values.items() if name in known}
        task = load_task(source.reference, texts).task
    else:
        function = cloudpickle.loads(source.make_task)
        known = named_parameters(function)
        task = call_make_task(function, {name: value for name, value in values.items() if name in known})
    return override_fields(task, {name: value for name, value in values.items() if name not in known}), list(known)


def rules_plan(task: Task, axes: Mapping[str, Any]) -> Plan:
    """Returns the rules' first plan without a compilation."""
    return rules_plans(task, PlanRequest.from_value(AUTO, axes).plan)[0]


# --- batch sizes


def measure_batch_size(
    source: TaskSource, values: Mapping[str, Value], axes: Mapping[str, Any], batch_size: int, waits: bool = True
) -> dict[str, Any]:
    """Returns figures of some steps, or the line on a lack of memory; the work of a trial process.

    Args:
        waits: whether to wait for a quiet machine.
    """
    try:
        task, _ = load_finder_task(source, values)
        task = replace(task, batch_size=batch_size, callbacks=(), epochs=10**6, schedule=None)
        samples = task.roles.train
        count = len(samples) if hasattr(samples, "__len__") else None
        device = torch.device(rules_plan(task, axes).device)
        free = free_memory_bytes(device)
        with closing(lower(task, rules_plan(task, axes))) as program:
            program.advance(1)  # allocates the optimizer's state
            program.read_sums()
            if waits:
                wait_until_quiet()
            load, done, began = LoadMeter(), 0, time.perf_counter()
            while (passed := time.perf_counter() - began) < _MEASURE_S:
                outcome = program.advance(1)
                program.read_sums()
                done += outcome.samples
                if outcome.ended:
                    program.end_epoch(0.0)
            busy = load.busy()
        figures = {"samples_per_s": done / passed, "memory_bytes": _peak(device), "free_bytes": free, "samples": count}
        return figures | {"busy": busy}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"error": f"out of memory: {describe_error(error)}"}


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_batch_sizes(
    processes: TrialProcesses,
    source: TaskSource,
    values: Mapping[str, Value],
    axes: Mapping[str, Any],
    name: str,
    say: Say,
) -> BatchSizeRange:
    """Doubles the batch size until it exceeds the data, the memory or the predicted memory.

    Raises:
        HotloopError: the Task can't be trained with the smallest size.
    """
    sizes: list[BatchSizeTrial] = []
    size, limit, busy = _SMALLEST, "", ""
    while not limit:
        predicted = predict_memory(sizes, size)
        found = processes.run(
            "hotloop.hyperparameters.finders:measure_batch_size",
            "batch-size.txt",
            source=source,
            values=values,
            axes=axes,
            batch_size=size,
            waits=not busy,
        )
        if isinstance(found, HotloopError):
            if not sizes:
                raise found
            found = {"error": str(found)}
        error = "the system killed the process, often for lack of memory" if found is None else found.get("error", "")
        found = {} if error or found is None else found
        busy = found.get("busy") or busy
        trial = BatchSizeTrial(
            batch_size=size,
            samples_per_s=found.get("samples_per_s"),
            memory_bytes=found.get("memory_bytes"),
            predicted_bytes=predicted,
            error=error,
        )
        sizes.append(trial)
        say(_line(trial))
        following = predict_memory(sizes, 2 * size)
        samples = found.get("samples")
        if error:
            limit = error
        elif samples is not None and 2 * size > samples:
            limit = f"the data has {samples:,} samples"
        elif following is not None and following > found["free_bytes"]:
            free_gb = found["free_bytes"] / 1e9
            limit = f"a batch of {2 * size} would need {following / 1e9:.2g} GB of memory, predicted; {free_gb:.2g} GB are free"
        size *= 2
    fitting = [one for one in sizes if not one.error]
    return BatchSizeRange(
        name=name,
        sizes=sizes,
        largest=max((one.batch_size for one in fitting), default=None),
        fastest=max(fitting, key=lambda one: one.samples_per_s or 0.0).batch_size if fitting and not busy else None,
        limit=limit,
        busy=busy,
    )


def predict_memory(sizes: Sequence[BatchSizeTrial], size: int) -> int | None:
    """Returns the memory of a batch size on the line through the largest measured sizes; None below two of them."""
    known = [(one.batch_size, one.memory_bytes) for one in sizes if one.memory_bytes is not None][-_FITTED_SIZES:]
    if len(known) < 2:
        return None
    (x0, y0), (x1, y1) = known[0], known[-1]
    return round(y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (size - x1))


def _line(trial: BatchSizeTrial) -> str:
    if trial.error:
        return f"batch size {trial.batch_size}: {trial.error}"
    assert trial.samples_per_s is not None and trial.memory_bytes is not None
    return f"batch size {trial.batch_size}: {trial.samples_per_s:,.0f} samples/s, {trial.memory_bytes / 1e6:,.0f} MB"
