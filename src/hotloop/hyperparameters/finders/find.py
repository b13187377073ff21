"""Finds a learning rate or a batch size in trial processes; `hotloop study --find`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotloop.core.files.source_files import split_reference
from hotloop.core.hardware.limits import allowed_cores
from hotloop.core.records.study import BatchSizeRange, LearningRateRange
from hotloop.core.reporter import Say
from hotloop.core.terminal import Terminal
from hotloop.errors import HotloopError, StudyError, did_you_mean
from hotloop.hyperparameters.finders.batch_size import measure_batch_sizes
from hotloop.hyperparameters.finders.finder_task import fixed_values
from hotloop.hyperparameters.space import Space, parse_space
from hotloop.hyperparameters.study_options import TaskSource
from hotloop.hyperparameters.trial_processes import TrialProcesses
from hotloop.report.learning_curves import learning_rate_lines, write_learning_rates

FINDERS = ("lr", "batch-size")


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
    values, axes = fixed_values(space), {"threads": len(allowed_cores()), **axes}
    name = Path(split_reference(source.reference)[0]).stem
    with tempfile.TemporaryDirectory() as log, TrialProcesses(Path(log)) as processes:
        if what == "batch-size":
            return measure_batch_sizes(processes, source, values, axes, name, say)
        found = processes.run(
            "hotloop.hyperparameters.finders.range_test:measure_learning_rates",
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
        write_learning_rates(page, found)
    return found
