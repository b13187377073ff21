"""Whether a loss is a sum over the batch: a batch that is twice and three times as large has twice and three times its loss."""

from __future__ import annotations

import math
from typing import Any

import torch

from hotloop.data.row_count import count_rows
from hotloop.data.tree import map_tensors, tensors
from hotloop.errors import blame
from hotloop.lowering.loss_copy import NotCopied, copied_loss
from hotloop.rng import preserved
from hotloop.task import Task

_CLOSE = 1e-4
"""How far a multiple of a loss may be off, relative to it."""


def sum_doubt(task: Task, output: Any, target: Any, device: torch.device) -> str:
    """One line if the loss grows with the batch, or if that can't be tried; empty if the loss doesn't.

    The loss is called on repeated outputs and targets, as a copy, with the random generators put back; the model isn't
    called.

    Args:
        output: of the model for one batch.
        target: of the same batch.
    """
    if task.loss is None or task.objective.sums_samples or task.objective.reduction == "sum":
        return ""
    try:
        once, *several = _losses(task, output, target, device)
    except NotCopied as error:
        return f"whether the loss is a sum over the batch isn't tried: {error}"
    except Exception as error:
        return f"whether the loss is a sum over the batch can't be tried: {blame(error)}"
    if not several or not math.isfinite(once) or not once:
        return ""
    if any(abs(more - times * once) > _CLOSE * abs(once) for times, more in enumerate(several, 2)):
        return ""
    return (
        "the loss is a sum over the batch: twice the samples have twice the loss, so that its figures and the size of a "
        "step depend on batch_size; divide it by the number of samples"
    )


def _losses(task: Task, output: Any, target: Any, device: torch.device) -> list[float]:
    """The loss of the batch once, twice and three times; empty where the rows of a batch can't be repeated."""
    whole = (output, target)
    rows, doubt = count_rows(whole)
    if doubt or not all(value.ndim and len(value) == rows for value in tensors(whole)):
        return []
    found = []
    with preserved(device), torch.no_grad():
        generators = torch.get_rng_state()
        for times in (1, 2, 3):
            torch.set_rng_state(generators)
            repeated = map_tensors(lambda value, times=times: torch.cat([value.detach()] * times), whole)  # type: ignore[misc]
            loss = copied_loss(task.loss)  # type: ignore[arg-type]
            found.append(float(loss(*repeated)))
    return found
