"""Checks of the first training step: probable mistakes that raise no error in torch are rejected or reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hotloop.errors import TaskError, type_name
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.losses.loss_calls import watch_losses
from hotloop.task import Task


@contextmanager
def check_losses(parts: LoweringContext, batch: Any) -> Iterator[None]:
    """Checks the torch losses that are called in the context, and reports probable mistakes.

    Raises:
        TaskError: output and target of a loss broadcast against each other.
    """
    classes = bool(parts.task.classes or parts.splits.classes)
    with watch_losses(parts.model, batch, classes=classes) as calls:
        yield
    for doubt in calls.doubts if calls is not None else ():
        parts.say(doubt)


def check_loss(loss: Any) -> None:
    """Raises TaskError unless the loss is a 0-dim tensor that depends on a trainable parameter."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type_name(loss)
        fixed = isinstance(loss, Tensor) and not loss.ndim
        raise TaskError(
            f"the loss is {shape}" + (" that depends on no trainable parameter" if fixed else ""),
            expected="a 0-dim tensor to differentiate",
            fix="return the mean over the batch" if not fixed else "check detach() and requires_grad",
        )


def check_clipping(task: Task, parameters: Sequence[Tensor]) -> None:
    """Raises TaskError if the Task clips gradients that torch can't clip."""
    sparse = any(value.grad is not None and value.grad.is_sparse for value in parameters)
    if sparse and (task.clip_norm is not None or task.clip_value is not None):
        raise TaskError(
            "the Task clips gradients, and some are sparse",
            expected="dense gradients, which torch can clip",
            fix="leave out clip_norm and clip_value, or sparse=True of the embedding",
        )
    if task.clip_value is not None and any(value.is_complex() for value in parameters):
        raise TaskError(
            "clip_value with complex parameters",
            expected="real numbers, which have an order",
            fix="use clip_norm instead",
        )


def report_means(parts: LoweringContext, names: Iterable[str]) -> None:
    """Reports, for a batch that is computed in parts, that a step's further figures are means over these parts."""
    if not (of := _batch_parts_name(parts)):
        return
    parts.say(
        f"{', '.join(names)}: means over {of}, weighted as the loss; a figure that is no mean over samples, "
        "such as a perplexity, differs from the figure of the whole batch"
    )


def _batch_parts_name(parts: LoweringContext) -> str:
    """Returns the name of the parts; empty if each batch is computed as a whole."""
    plan = parts.plan
    if plan.parallel == "stages" and plan.microbatches != 1:
        return "the microbatches of each batch"
    if not parts.world.is_single and parts.joint_ranks.is_single:
        return "the ranks' rows of each batch"
    return "the pieces of each batch" if plan.accumulation > 1 else ""
