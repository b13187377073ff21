"""Detection of losses that are a sum over the batch: twice the samples have twice the loss."""

from __future__ import annotations

import math
from typing import Any

import torch

from hotloop.core.random.rng import preserve_generators
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.row_count import count_rows
from hotloop.errors import describe_error
from hotloop.lowering.losses.loss_copy import LossNotCopied, copy_loss
from hotloop.task import Task

_RELATIVE_TOLERANCE = 1e-4
"""Relative tolerance of a multiple of a loss."""


def check_loss_sum(task: Task, output: Any, target: Any, device: torch.device) -> str:
    """Returns one line if the loss grows with the batch, or if the check fails; empty otherwise.

    The check calls a copy of the loss on repeated outputs and targets, and restores the random generators. The check doesn't
    call the model.

    Args:
        output: the model's output for one batch.
        target: the target of the same batch.
    """
    if task.loss is None or task.objective.sums_samples or task.objective.reduction == "sum":
        return ""
    try:
        once, *several = _losses_of_copies(task, output, target, device)
    except LossNotCopied as error:
        return f"the test for a loss that is a sum over the batch is left out: {error}"
    except Exception as error:
        return f"the test for a loss that is a sum over the batch failed to run: {describe_error(error)}"
    if not several or not math.isfinite(once) or not once:
        return ""
    if any(abs(more - times * once) > _RELATIVE_TOLERANCE * abs(once) for times, more in enumerate(several, 2)):
        return ""
    return (
        "the loss is a sum over the batch: twice the samples have twice the loss, so the loss and the size of "
        "a step depend on batch_size; divide it by the number of samples"
    )


def _losses_of_copies(task: Task, output: Any, target: Any, device: torch.device) -> list[float]:
    """Returns the losses of the batch, of two copies and of three copies of it; empty if its rows can't be repeated."""
    whole = (output, target)
    rows, doubt = count_rows(whole)
    if doubt or not all(value.ndim and len(value) == rows for value in tree_tensors(whole)):
        return []
    found = []
    with preserve_generators(device), torch.no_grad():
        generators = torch.get_rng_state()
        for times in (1, 2, 3):
            torch.set_rng_state(generators)
            repeated = map_tensors(lambda value, times=times: torch.cat([value.detach()] * times), whole)  # type: ignore[misc]
            loss = copy_loss(task.loss)  # type: ignore[arg-type]
            found.append(float(loss(*repeated)))
    return found
