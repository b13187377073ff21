"""Accuracy on a fixed sample of the training data, at low cost."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable

import torch

from hotloop.core.records.training import EpochRecord
from hotloop.data.sources import Table
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.program import Program

_MIN_SAMPLES, _MAX_SAMPLES = 200, 2000

_MAX_BYTES = 1 << 27
"""Largest copy of samples."""

_SHARE = 0.01
"""Evaluated samples for each trained sample: a forward pass is about a third of a step, so the cost is about 0.3 %."""


def training_accuracy_of(program: Program) -> Callable[[EpochRecord], float | None]:
    """Returns a function that evaluates the model on the sample after an epoch; None after the other epochs.

    The first and the last epoch have an accuracy, and every n-th: n follows from the sizes alone, so that a repeated
    training does the same. The accuracy is without augmentation, as that of validation data. It is None without a
    validation accuracy, for Tasks with metrics of their own, for several ranks, and for data that isn't in memory as
    arrays. The function doesn't prolong the program's life.
    """
    task, splits, plan = program.parts.task, program.parts.splits, program.parts.plan
    source = splits.train
    is_measured = task.metrics is None and splits.validation is not None and plan.parallel == "none"
    if not (is_measured and isinstance(source, Table)):
        return lambda record: None
    share = len(source) * _SHARE
    count = min(len(source), max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(share))))
    count = max(1, min(count, _MAX_BYTES * len(source) // max(1, source.nbytes())))
    index = torch.tensor(sorted(random.Random(0).sample(range(len(source)), count)))
    interval, last, owner = math.ceil(count / share), task.epochs, weakref.ref(program)

    def accuracy(record: EpochRecord) -> float | None:
        found, is_due = owner(), record.epoch in (1, last) or record.epoch % interval == 0
        if found is None or not is_due or "accuracy" in record.train or "accuracy" not in record.validation:
            return None
        return evaluate(found, source.subset(index)).values.get("accuracy")

    return accuracy
