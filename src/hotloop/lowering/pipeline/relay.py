"""torch's pipeline schedules for microbatches, and random draws as in one process."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.distributed.wrappers.global_batch_rng import BatchDimension, DrawPattern, RandomOp

_ROWS = "rows"


@dataclass(frozen=True)
class ReadyStage:
    """A stage of a chain.

    Attributes:
        number: its place in the chain.
        module: `(*arrived, rows, **leaves)` -> outputs.
        leaves: indices of the batch's tensors that it uses.
        arriving, leaving: tensors without content, with the shapes of its inputs and outputs.
    """

    number: int
    module: nn.Module
    leaves: tuple[int, ...]
    arriving: tuple[Tensor, ...]
    leaving: tuple[Tensor, ...]


class MicrobatchSchedule:
    """Runs microbatches of equal size through all stages.

    Args:
        station: the stage of this rank.
        stages: number of stages in the chain.
        loss: `(outputs of the last stage, share)` -> the microbatch's part of the loss; None for a forward pass alone.
    """

    def __init__(
        self,
        station: ReadyStage,
        stages: int,
        device: torch.device,
        pipeline: str,
        microbatches: int,
        loss: Callable[[Any, Tensor], Tensor] | None,
    ) -> None:
        stage = PipelineStage(
            station.module, station.number, stages, device, input_args=station.arriving, output_args=station.leaving
        )
        self._leaves = station.leaves
        alternating = loss is not None and pipeline == "1f1b" and microbatches >= stages  # fewer are GPipe
        schedule: Any = Schedule1F1B if alternating else ScheduleGPipe
        self._schedule = schedule(stage, n_microbatches=microbatches, loss_fn=loss, scale_grads=False)

    def __call__(self, leaves: Sequence[Tensor], first: int, shares: Tensor | None = None) -> None:
        """Runs forward, and backward if there is a loss.

        Args:
            leaves: the batch's tensors, cut to the rows of these microbatches.
            first: number of the first of these rows in the batch.
            shares: each microbatch's share of the batch's loss: (microbatches,).
        """
        rows = torch.arange(first, first + len(leaves[0]))
        values = {_ROWS: rows, **{leaf_name(place): leaves[place] for place in self._leaves}}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                self._schedule.step(target=shares, return_outputs=False, **values)

        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):  # torch wraps a stage's error in one about shapes
                raise error.__cause__ from None
            raise


def leaf_name(place: int) -> str:
    """Returns the keyword under which a stage gets one of the batch's tensors."""
    return f"leaf_{place}"


class ScheduledRng:
    """The draws of one rank's stage in a step.

    Each rank draws for the whole batch and for all stages, since a generator reaches a later stage's state only by
    drawing; the rank stores the draws of its own stage.

    Args:
        own: the stage of this rank.
    """

    def __init__(self, pattern: DrawPattern, own: int) -> None:
        self._pattern, self._own = pattern, own
        self._drawn: list[tuple[Tensor, BatchDimension | None]] = []

    def draw(self, of_stages: Sequence[Sequence[RandomOp]], rows: int, samples: int) -> None:
        """Draws for a batch from torch's generators.

        Args:
            of_stages: the operations of each stage, in order, for `rows` rows.
        """
        self._drawn = []
        number = itertools.count()
        for stage, drawings in enumerate(of_stages):
            for drawing in drawings:
                shape, along = self._pattern.whole_shape(drawing.shape, rows, samples, next(number))
                value = drawing.draw(shape, along and along.order)
                if stage == self._own:
                    self._drawn.append((value, along))

    def replay(self, first: int, rows: int) -> ReplayedDraws:
        """Returns a context in which this rank's stage draws the numbers of these rows."""
        return ReplayedDraws(iter(self._drawn), first, rows)


class ReplayedDraws(TorchDispatchMode):
    """Gives random operators the recorded draws in order.

    Args:
        drawn: for the whole batch, each with its dimension along the samples.
        first, rows: of the batch.
    """

    def __init__(self, drawn: Iterator[tuple[Tensor, BatchDimension | None]], first: int, rows: int) -> None:
        super().__init__()
        self._drawn, self._first, self._rows = drawn, first, rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = RandomOp.of(function, args, kwargs or {})
        if drawing is None:
            return function(*args, **(kwargs or {}))
        value, along = next(self._drawn)
        if along is not None:
            value = value.narrow(along.dim, self._first * along.each, self._rows * along.each)
        return drawing.finish(args, value)
