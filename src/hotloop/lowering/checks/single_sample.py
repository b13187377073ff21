"""Check that the model can train on one sample, if an epoch has a batch or a part of a batch with one sample."""

from __future__ import annotations

import itertools

from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.task_parts.models import copy_model
from hotloop.data.batch_tree import to_device
from hotloop.data.feeds.feed import first_batch
from hotloop.data.order import rank_bounds
from hotloop.errors import TaskError, describe_error
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.transforms.accumulation import piece_bounds

SINGLE_VALUE_ERROR = "Expected more than 1 value per channel when training"
"""The error that torch raises if a batch norm gets one value per channel."""


def check_single_samples(parts: LoweringContext) -> None:
    """Trains a copy of the model on one sample if a batch or a part of a batch has one sample; the Task is unchanged.

    Raises:
        TaskError: training on one sample fails; the message names the batch and the fix.
    """
    order = parts.splits.order
    if order is None:
        return
    last = order.size(order.batches - 1)
    whole = last == 1 and parts.plan.parallel != "local"  # with "local" each rank normalises its own samples
    if not whole and _smallest_part(parts, {order.batch_size, last}) > 1:
        return
    try:
        failed = _training_error(parts)
    except Exception as error:  # the first step reports it
        parts.say(f"training on one sample is not tested: {describe_error(error)}")
        return
    if not failed or (not whole and SINGLE_VALUE_ERROR in failed):
        return  # ranks normalise over the whole batch; another check compares pieces
    if not whole:
        what = f"a part of a batch has 1 sample, on which the model fails in training: {failed}"
        raise TaskError(
            what, expected="a model that takes one sample", fix="use fewer pieces or ranks, or a larger batch_size"
        )
    if order.batch_size == 1:
        what, fix = "batches have 1 sample", "use a batch_size of 2 or more"
    else:
        what = (
            f"the last batch of each epoch has 1 sample ({order.samples:,} samples in batches of {order.batch_size:,})"
        )
        fix = "give the Task drop_last=True, which leaves that batch out, or another batch_size"
    raise TaskError(
        f"{what}, on which the model fails in training: {failed}",
        expected="2 samples or more in each batch, for a batch norm"
        if SINGLE_VALUE_ERROR in failed
        else "a model that takes one sample",
        fix=fix,
    )


def _smallest_part(parts: LoweringContext, sizes: set[int]) -> int:
    """Returns the smallest nonzero number of samples of a piece or of a rank's part, for batches of these sizes."""
    smallest = min(sizes)
    for size in sizes:
        ranks = parts.evaluation_ranks.ranks
        edges = [
            *itertools.pairwise(piece_bounds(size, parts.plan.accumulation)),
            *(rank_bounds(size, rank, ranks) for rank in range(ranks)),
        ]
        cut = [last - first for first, last in edges]
        smallest = min(smallest, *(count for count in cut if count))
    return smallest


def _training_error(parts: LoweringContext) -> str:
    """Returns the error of a copy of the model for one sample, with the model's own modes; empty without an error."""
    with preserve_generators(*parts.devices):
        model = copy_model(parts.model)
        batch = to_device(first_batch(parts.splits, 1), parts.device)
        RandomStreams(parts.task.seed, parts.device).reseed("look")
        with parts.with_copied_loss() as own:
            try:
                own.compute(model, batch)
            except Exception as error:
                return describe_error(error)
    return ""
