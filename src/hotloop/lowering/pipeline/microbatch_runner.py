"""Execution of batches by the stages of a model: torch's schedule for each shape of microbatches, and
random draws as in one process.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hotloop.core.torch_private import TorchDispatchMode
from hotloop.distributed.wrappers.global_batch_rng import BatchDimension, DrawPattern, RandomOp
from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.pipeline.graph_split import GraphPiece, LossModule, TensorLeaves
from hotloop.lowering.pipeline.ownership import StageOwnership
from hotloop.lowering.pipeline.partition import StageChain, microbatch_rows, names_in_piece
from hotloop.lowering.pipeline.piece_costs import ContextFactory
from hotloop.lowering.transforms.precision import autocast_context
from hotloop.task import StepResult

_ROWS = "rows"


class MicrobatchSchedule:
    """Runs microbatches of equal size through all stages.

    Args:
        stage: the stage of this rank.
        leaves: indices of the batch's tensors that it uses.
        loss: `(outputs of the last stage, share)` -> the microbatch's part of the loss; None for a forward pass alone.
    """

    def __init__(
        self,
        stage: PipelineStage,
        leaves: Sequence[int],
        pipeline: str,
        microbatches: int,
        loss: Callable[[Any, Tensor], Tensor] | None,
    ) -> None:
        self._leaves = leaves
        alternating = loss is not None and pipeline == "1f1b" and microbatches >= stage.num_stages  # fewer are GPipe
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


class MicrobatchRunner:
    """Runs batches through the stages of all ranks.

    torch's pipelines take microbatches of one shape. A batch, or a remainder, of another shape is exported, cut and run
    separately, with the same result.
    """

    def __init__(
        self,
        parts: LoweringContext,
        objective: LossModule,
        ownership: StageOwnership,
        scheduled_rng: ScheduledRng | None,
    ) -> None:
        self._parts, self._objective, self._ownership, self._scheduled_rng = parts, objective, ownership, scheduled_rng
        self._chains: dict[Any, StageChain] = {}
        self._runs: dict[Any, MicrobatchSchedule] = {}
        self._outputs: list[tuple[Tensor, ...]] = []

    def sizes(self, samples: int) -> list[tuple[int, int]]:
        """Returns first row and number of rows of each microbatch."""
        sizes, first = [], 0
        for count, rows in self._schedules(samples):
            sizes += [(first + place * rows, rows) for place in range(count)]
            first += count * rows
        return sizes

    def __call__(self, leaves: TensorLeaves, shares: Tensor | None = None) -> list[StepResult]:
        """Runs forward, and backward with `shares`: each microbatch's share of the batch's loss, (microbatches,).

        Returns:
            The result of each microbatch on the rank of the last stage; empty on others.
        """
        training, first, done = shares is not None, 0, 0
        results: list[StepResult] = []
        runs = self._schedules(len(leaves[0]))
        self._draw(leaves, runs[0][1], training)
        for count, rows in runs:
            last = first + count * rows
            cut = [leaf[first:last] for leaf in leaves]
            chain, schedule = self._ready([leaf[:rows] for leaf in cut], count, training)
            self._outputs.clear()
            schedule(cut, first, None if shares is None else shares[done : done + count])
            results += [chain.traced.result(values) for values in self._outputs]
            first, done = last, done + count
        self._outputs.clear()
        return results

    def _schedules(self, samples: int) -> list[tuple[int, int]]:
        """Returns `(microbatches, rows of each)` in order; one run of a torch schedule has microbatches of equal size.

        The remainder of a batch is a run of its own. An evaluation's batch may be larger than a training batch.
        """
        size, rows = self._parts.splits.batch_size, microbatch_rows(self._parts)
        runs = []
        for first in range(0, samples, size):
            whole, left = divmod(min(size, samples - first), rows)
            runs += [(whole, rows)] if whole else []
            runs += [(1, left)] if left else []
        return runs

    def _draw(self, leaves: TensorLeaves, rows: int, training: bool) -> None:
        if self._scheduled_rng is not None:
            chain = self._chain([leaf[:rows] for leaf in leaves], training)
            self._scheduled_rng.draw([shape.drawings for shape in chain.piece_shapes], rows, len(leaves[0]))

    def _ready(self, like: TensorLeaves, count: int, training: bool) -> tuple[StageChain, MicrobatchSchedule]:
        chain, parts = self._chain(like, training), self._parts
        if (id(chain), count) not in self._runs:
            loss = _loss_share if training else None
            leaves = chain.pieces[parts.world.rank].leaves
            self._runs[id(chain), count] = MicrobatchSchedule(
                self._stage(chain), leaves, parts.plan.pipeline, count, loss
            )
        return chain, self._runs[id(chain), count]

    def _chain(self, like: TensorLeaves, training: bool) -> StageChain:
        shape = (training, *((leaf.shape, leaf.dtype) for leaf in like))
        if shape not in self._chains:
            self._chains[shape] = self._cut(like, training)
        return self._chains[shape]

    def _cut(self, like: TensorLeaves, training: bool) -> StageChain:
        with self._ownership.on_host(), torch.enable_grad():
            samples = [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in like]
            chain = StageChain.from_plan(self._parts, self._objective.train(training), samples)
        stage = self._parts.world.rank
        strange = [name for name in names_in_piece(chain.pieces[stage]) if name not in self._ownership.own]
        if strange:
            raise PlanError(
                f"parallel=stages: for {len(like[0])} samples {'in training' if training else 'in evaluation'}"
                f" stage {stage} uses {strange[0]!r}, which belongs to another",
                expected="the same modules in the same order for every batch",
                fix="use parallel=sharded",
            )
        return chain

    def _stage(self, chain: StageChain) -> PipelineStage:
        stage = self._parts.world.rank
        piece, shape = chain.pieces[stage], chain.piece_shapes[stage]
        _move_constants(piece, self._parts.device)
        replay = None if self._scheduled_rng is None else self._scheduled_rng.replay
        outputs = self._outputs if stage == len(chain.pieces) - 1 else None
        leading = [value.requires_grad for value in shape.leaving]
        module = _Stage(piece, partial(autocast_context, self._parts), replay, leading, outputs)
        return PipelineStage(
            module, stage, len(chain.pieces), self._parts.device, input_args=shape.arriving, output_args=shape.leaving
        )


class _Stage(nn.Module):
    """A piece in the form that torch's pipelines call.

    Args:
        around: context of the computation, such as autocast.
        replay: `(first row, rows)` -> context in which draws are those of these rows.
        leading: whether each output leads to the loss; others get no gradient.
        outputs: list that receives the last stage's outputs.
    """

    def __init__(
        self,
        piece: GraphPiece,
        around: ContextFactory,
        replay: Callable[[int, int], AbstractContextManager[Any]] | None,
        leading: Sequence[bool],
        outputs: list[tuple[Tensor, ...]] | None,
    ) -> None:
        super().__init__()
        self.piece, self._around, self._replay, self._leading, self._outputs = piece, around, replay, leading, outputs

    def forward(self, *arrived: Tensor, rows: Tensor, **leaves: Tensor) -> tuple[Tensor, ...]:
        batch = {place: leaves[leaf_name(place)] for place in self.piece.leaves}
        with self._around(), self._replay(int(rows[0]), len(rows)) if self._replay else nullcontext():
            left = tuple(value.contiguous() for value in self.piece(arrived, batch))
        left = tuple(v if leads else v.detach() for v, leads in zip(left, self._leading, strict=True))
        if self._outputs is not None:
            self._outputs.append(tuple(value.detach() for value in left))
        return left


def _loss_share(left: Any, share: Tensor) -> Tensor:
    """Returns the microbatch's part of the loss; 0 for a share of 0, where the loss may be NaN."""
    loss = left[0] if isinstance(left, Sequence) else left
    return torch.where(share[0] == 0, 0.0, loss * share[0].to(loss.dtype))


def _move_constants(piece: GraphPiece, device: torch.device) -> None:
    host = torch.device("cpu")
    if device == host:
        return
    for node in piece.body.graph.nodes:
        if node.kwargs.get("device") == host:
            node.kwargs = {**node.kwargs, "device": device}
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(piece.body.get_submodule(owner), name)
            if isinstance(value, Tensor) and value.device == host:
                value.data = value.data.to(device)
    piece.body.recompile()
