"""`hotloop study --find`: finds a learning rate or a batch size in trial processes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.core.files.source_files import split_reference
from hotloop.core.hardware.limits import allowed_cores
from hotloop.core.records.study import BatchSizeRange, LearningRateRange
from hotloop.core.reporter import Report
from hotloop.errors import HotloopError, StudyError, did_you_mean
from hotloop.hyperparameters.finders.batch_size import find_batch_size
from hotloop.hyperparameters.finders.finder_task import fixed_values
from hotloop.hyperparameters.space import Space
from hotloop.hyperparameters.trial_processes import TrialProcesses
from hotloop.report.learning_rate import write_learning_rates

FINDERS = ("lr", "batch-size")


def find(
    what: str, reference: str, space: Space, axes: Mapping[str, Any], page: Path | None, say: Report
) -> LearningRateRange | BatchSizeRange:
    """Finds a learning rate (`lr`) or a batch size (`batch-size`) for a Task in a file.

    Args:
        page: where to write the picture of the learning rates.

    Raises:
        StudyError: an unknown finder, or a parameter with several values.
    """
    if what not in FINDERS:
        raise StudyError(f"--find {what}", expected=" or ".join(FINDERS), fix=did_you_mean(what, FINDERS))
    values, axes = fixed_values(space), {"threads": len(allowed_cores()), **axes}
    name = Path(split_reference(reference)[0]).stem
    with tempfile.TemporaryDirectory() as log, TrialProcesses(Path(log)) as processes:
        if what == "batch-size":
            return find_batch_size(processes, reference, values, axes, name, say)
        found = processes.run(
            "hotloop.hyperparameters.finders.range_test:find_learning_rate",
            "lr.txt",
            reference=reference,
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
