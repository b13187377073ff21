"""Whether the model can be trained on a batch of one sample, where some batch of each epoch has no more."""

from __future__ import annotations

import itertools

from hotloop.copies import copied
from hotloop.data.feed import peek
from hotloop.data.order import part
from hotloop.data.tree import to_device
from hotloop.errors import TaskError, blame
from hotloop.lowering.accumulation import bounds
from hotloop.lowering.ingredients import Ingredients
from hotloop.rng import Streams, preserved

NORMALISED = "Expected more than 1 value per channel when training"
"""What torch raises where a batch norm gets one value for each channel."""


def check_single_samples(parts: Ingredients) -> None:
    """Trains a copy of the model on one sample where batches, or their parts, have one; nothing of it stays.

    Raises:
        TaskError: it fails; the message names the batch and what to do.
    """
    order = parts.roles.order
    if order is None:
        return
    last = order.size(order.batches - 1)
    whole = last == 1 and not _is_joined(parts)
    if not whole and _smallest(parts, {order.batch_size, last}) > 1:
        return
    try:
        failed = _tried(parts)
    except Exception as error:  # the first step reports it
        parts.say(f"whether the model can be trained on one sample isn't tried: {blame(error)}")
        return
    if not failed or (not whole and NORMALISED in failed):  # ranks normalise over the whole batch, pieces are compared
        return
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
        if NORMALISED in failed
        else "a model that takes one sample",
        fix=fix,
    )


def _is_joined(parts: Ingredients) -> bool:
    """Whether each rank normalises by statistics of its own where it has one sample."""
    return parts.plan.parallel == "local"


def _smallest(parts: Ingredients, sizes: set[int]) -> int:
    """The fewest samples that a piece or a rank's part of batches of these sizes has, of those that have any."""
    smallest = min(sizes)
    for size in sizes:
        ranks = parts.dealt.ranks
        edges = [
            *itertools.pairwise(bounds(size, parts.plan.accumulation)),
            *(part(size, rank, ranks) for rank in range(ranks)),
        ]
        cut = [last - first for first, last in edges]
        smallest = min(smallest, *(count for count in cut if count))
    return smallest


def _tried(parts: Ingredients) -> str:
    """What a copy of the model raises for one sample in its own mode; empty if nothing."""
    with preserved(*parts.devices):
        model = copied(parts.model)
        batch = to_device(peek(parts.roles, 1), parts.device)
        Streams(parts.task.seed, parts.device).reseed("look")
        with parts.on_copied_loss() as own:
            try:
                own.compute(model, batch)
            except Exception as error:
                return blame(error)
    return ""
