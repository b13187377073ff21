"""The largest batch size that fits, and the one with the best samples/s, each tried in a process of its own."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.records.study import BatchSizeRange, BatchSizeTrial, Value
from hotloop.core.reporter import Say
from hotloop.errors import HotloopError, describe_error, is_out_of_memory
from hotloop.hyperparameters.finders.finder_task import load_finder_task, rules_plan
from hotloop.hyperparameters.study_options import TaskSource
from hotloop.hyperparameters.trial_processes import TrialProcesses
from hotloop.lowering.build import lower

_SMALLEST = 8
_MEASURE_S = 1.0
_FITTED_SIZES = 3
"""Sizes, the largest ones, from which the memory of the next size is predicted."""


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
            "hotloop.hyperparameters.finders.batch_size:measure_batch_size",
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
