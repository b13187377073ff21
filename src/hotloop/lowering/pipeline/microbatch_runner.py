"""Execution of batches by the stages of a model: one schedule for each shape of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.pipeline.graph_split import GraphPiece, LossModule, TensorLeaves
from hotloop.lowering.pipeline.ownership import StageOwnership
from hotloop.lowering.pipeline.partition import StageChain, microbatch_rows, names_in_piece
from hotloop.lowering.pipeline.piece_costs import ContextFactory
from hotloop.lowering.pipeline.relay import MicrobatchSchedule, ReadyStage, ScheduledRng, leaf_name
from hotloop.lowering.transforms.precision import autocast_context
from hotloop.task import StepResult


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
            self._runs[id(chain), count] = MicrobatchSchedule(
                self._station(chain), len(chain.pieces), parts.device, parts.plan.pipeline, count, loss
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

    def _station(self, chain: StageChain) -> ReadyStage:
        stage = self._parts.world.rank
        piece, shape = chain.pieces[stage], chain.piece_shapes[stage]
        _move_constants(piece, self._parts.device)
        replay = None if self._scheduled_rng is None else self._scheduled_rng.replay
        outputs = self._outputs if stage == len(chain.pieces) - 1 else None
        leading = [value.requires_grad for value in shape.leaving]
        module = _Stage(piece, partial(autocast_context, self._parts), replay, leading, outputs)
        return ReadyStage(stage, module, piece.leaves, shape.arriving, shape.leaving)


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
