"""Microbatches passed along stages of a model by torch's pipeline schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

CHUNKS = 2
"""Stages of each rank where they are interleaved."""

_ROWS = "rows"


def runs(samples: int, rows: int, pipeline: str, ranks: int) -> list[tuple[int, int]]:
    """`(microbatches, rows of each)` that make up a batch, in order: torch's schedules take equal ones.

    What is left over beside whole microbatches of so many rows is one of its own.
    """
    whole, left = divmod(samples, rows)
    found = [(whole, rows)] if whole else []
    if pipeline == "interleaved" and whole > ranks and whole % (whole // ranks):  # torch wants equal rounds
        odd = whole % ranks
        found = [(whole - odd, rows), (odd, rows)]
    return [*found, (1, left)] if left else found


@dataclass(frozen=True)
class Station:
    """A stage, ready to be one of a chain.

    Attributes:
        number: its place in the chain.
        module: `(*arrived, rows, **leaves)` -> what leaves it.
        leaves: which of the batch's tensors it uses.
        arriving, leaving: tensors without content, like those that cross.
    """

    number: int
    module: nn.Module
    leaves: tuple[int, ...]
    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]


class Relay:
    """So many microbatches of so many rows, through all stages.

    Args:
        stations: those of this rank.
        stages: in the whole chain.
        loss: `(what left the last stage, share)` -> the microbatch's part of the loss; None for a forward pass alone.
    """

    def __init__(
        self,
        stations: Sequence[Station],
        stages: int,
        device: torch.device,
        pipeline: str,
        microbatches: int,
        loss: Callable[[Any, Tensor], Tensor] | None,
    ) -> None:
        built: list[Any] = [
            PipelineStage(s.module, s.number, stages, device, input_args=s.arriving, output_args=s.leaving)
            for s in stations
        ]
        self._leaves = sorted({place for station in stations for place in station.leaves})
        given: dict[str, Any] = dict(n_microbatches=microbatches, loss_fn=loss, scale_grads=False)
        self._schedule: Any
        if pipeline == "interleaved":
            self._schedule = (ScheduleInterleaved1F1B if loss is not None else ScheduleLoopedBFS)(built, **given)
        else:
            alternating = loss is not None and pipeline == "1f1b" and microbatches >= stages  # of fewer it is GPipe
            self._schedule = (Schedule1F1B if alternating else ScheduleGPipe)(built[0], **given)

    def __call__(self, leaves: Sequence[Tensor], first: int, shares: Tensor | None = None) -> None:
        """Forward, and backward where there is a loss.

        Args:
            leaves: the batch's tensors, cut to the rows of these microbatches.
            first: the first of these rows in the batch.
            shares: what each microbatch's loss counts of the batch's, (microbatches,).
        """
        rows = torch.arange(first, first + len(leaves[0]))
        given = {_ROWS: rows, **{leaf_name(place): leaves[place] for place in self._leaves}}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                self._schedule.step(target=shares, return_outputs=False, **given)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):  # torch packs what a stage raises into shapes of its tensors
                raise error.__cause__ from None
            raise


def leaf_name(place: int) -> str:
    """Under which name a stage gets one of the batch's tensors."""
    return f"leaf_{place}"
