"""Batches through the stages of a model: one relay for each shape that microbatches come in."""

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
from hotloop.lowering.pipeline.partition import StageChain, microbatch_rows, names_in_piece, stage_count
from hotloop.lowering.pipeline.piece_costs import ContextFactory
from hotloop.lowering.pipeline.relay import MicrobatchSchedule, ReadyStage, ScheduledRng, leaf_name, microbatch_runs
from hotloop.lowering.transforms.precision import autocast_context
from hotloop.task import StepResult


class MicrobatchRunner:
    """Runs batches through the stages of all ranks, of which this one has some.

    torch's pipelines take microbatches of one shape. So a batch, or what is left of one, that comes in another is
    exported, cut and run by itself; the result is the same.

    Attributes:
        own: the stages of this rank.
    """

    def __init__(
        self, parts: LoweringContext, objective: LossModule, holding: StageOwnership, ahead: ScheduledRng | None
    ) -> None:
        self._parts, self._objective, self._holding, self._ahead = parts, objective, holding, ahead
        self.own = rank_stages(parts)
        self._chains: dict[Any, StageChain] = {}
        self._relays: dict[Any, MicrobatchSchedule] = {}
        self._heard: list[tuple[Tensor, ...]] = []

    def sizes(self, samples: int) -> list[tuple[int, int]]:
        """First row and number of rows of each microbatch."""
        found, first = [], 0
        for count, rows in self._schedules(samples):
            found += [(first + place * rows, rows) for place in range(count)]
            first += count * rows
        return found

    def __call__(self, leaves: TensorLeaves, shares: Tensor | None = None) -> list[StepResult]:
        """Forward, and backward with `shares`: what each microbatch's loss counts of the batch's, (microbatches,).

        Returns:
            What came of each microbatch, on the rank that has the last stage; empty on the others.
        """
        training, first, done = shares is not None, 0, 0
        found: list[StepResult] = []
        every = self._schedules(len(leaves[0]))
        self._draw(leaves, every[0][1], training)
        for count, rows in every:
            last = first + count * rows
            given = [leaf[first:last] for leaf in leaves]
            chain, relay = self._ready([leaf[:rows] for leaf in given], count, training)
            self._heard.clear()
            relay(given, first, None if shares is None else shares[done : done + count])
            found += [chain.traced.result(values) for values in self._heard]
            first, done = last, done + count
        self._heard.clear()
        return found

    def _schedules(self, samples: int) -> list[tuple[int, int]]:
        """`(microbatches, rows of each)`; an evaluation's batch may be larger than what fits at once."""
        parts, size = self._parts, self._parts.splits.batch_size
        blocks = [min(size, samples - first) for first in range(0, samples, size)]
        return [
            run
            for block in blocks
            for run in microbatch_runs(block, microbatch_rows(parts), parts.plan.pipeline, parts.world.ranks)
        ]

    def _draw(self, leaves: TensorLeaves, rows: int, training: bool) -> None:
        if self._ahead is not None:
            chain = self._chain([leaf[:rows] for leaf in leaves], training)
            self._ahead.draw([seen.drawings for seen in chain.piece_shapes], rows, len(leaves[0]))

    def _ready(self, like: TensorLeaves, count: int, training: bool) -> tuple[StageChain, MicrobatchSchedule]:
        chain, parts = self._chain(like, training), self._parts
        if (id(chain), count) not in self._relays:
            loss = _loss_share if training else None
            stations = [self._station(chain, stage) for stage in self.own]
            self._relays[id(chain), count] = MicrobatchSchedule(
                stations, len(chain.pieces), parts.device, parts.plan.pipeline, count, loss
            )
        return chain, self._relays[id(chain), count]

    def _chain(self, like: TensorLeaves, training: bool) -> StageChain:
        shape = (training, *((leaf.shape, leaf.dtype) for leaf in like))
        if shape not in self._chains:
            self._chains[shape] = self._cut(like, training)
        return self._chains[shape]

    def _cut(self, like: TensorLeaves, training: bool) -> StageChain:
        with self._holding.on_host(), torch.enable_grad():
            samples = [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in like]
            chain = StageChain.from_plan(self._parts, self._objective.train(training), samples)
        for stage in self.own:
            strange = [name for name in names_in_piece(chain.pieces[stage]) if name not in self._holding.own]
            if strange:
                raise PlanError(
                    f"parallel=stages: for {len(like[0])} samples {'in training' if training else 'in evaluation'}"
                    f" stage {stage} uses {strange[0]!r}, which belongs to another",
                    expected="the same modules in the same order, whatever the batch",
                    fix="use parallel=sharded",
                )
        return chain

    def _station(self, chain: StageChain, stage: int) -> ReadyStage:
        piece, seen = chain.pieces[stage], chain.piece_shapes[stage]
        _move_constants(piece, self._parts.device)
        given = partial(self._ahead.replay, stage) if self._ahead is not None else _no_order_check
        heard = self._heard if stage == len(chain.pieces) - 1 else None
        leading = [value.requires_grad for value in seen.leaving]
        module = _Stage(piece, partial(autocast_context, self._parts), given, leading, heard)
        return ReadyStage(stage, module, piece.leaves, seen.arriving, seen.leaving)


class _Stage(nn.Module):
    """A piece as torch's pipelines call it.

    Args:
        around: the numbers that it computes in.
        given: `(first row, rows)` -> a context in which draws are those of these rows.
        leading: of all that leaves it, whether it leads to the loss; only that gets a gradient back, of zeros else.
        heard: gets what leaves the last stage.
    """

    def __init__(
        self,
        piece: GraphPiece,
        around: ContextFactory,
        given: Callable[[int, int], AbstractContextManager[Any]],
        leading: Sequence[bool],
        heard: list[tuple[Tensor, ...]] | None,
    ) -> None:
        super().__init__()
        self.piece, self._around, self._given, self._leading, self._heard = piece, around, given, leading, heard

    def forward(self, *arrived: Tensor, rows: Tensor, **leaves: Tensor) -> tuple[Tensor, ...]:
        batch = {place: leaves[leaf_name(place)] for place in self.piece.leaves}
        with self._around(), self._given(int(rows[0]), len(rows)):
            left = tuple(value.contiguous() for value in self.piece(arrived, batch))
        left = tuple(v if leads else v.detach() for v, leads in zip(left, self._leading, strict=True))
        if self._heard is not None:
            self._heard.append(tuple(value.detach() for value in left))
        return left


def rank_stages(parts: LoweringContext) -> range:
    """The stages of this rank."""
    return range(parts.world.rank, stage_count(parts), parts.world.ranks)


def _loss_share(left: Any, share: Tensor) -> Tensor:
    """Of what left the last stage the loss, counted as the microbatch counts; a mean of nothing counts nothing."""
    loss = left[0] if isinstance(left, Sequence) else left
    return torch.where(share[0] == 0, 0.0, loss * share[0].to(loss.dtype))


def _no_order_check(first: int, rows: int) -> AbstractContextManager[None]:
    return nullcontext()


def _move_constants(piece: GraphPiece, device: torch.device) -> None:
    """Has constants of the graph, and tensors that it makes, be on the device that it runs on, and not where it was made."""
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
