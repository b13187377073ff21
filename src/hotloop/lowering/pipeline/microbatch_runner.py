"""Batches through the stages of a model: one relay for each shape that microbatches come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import PlanError
from hotloop.lowering.context import Ingredients
from hotloop.lowering.pipeline.graph_split import Leaves, Objective, Piece
from hotloop.lowering.pipeline.ownership import Holding
from hotloop.lowering.pipeline.partition import Chain, held_by, rows_of, stages_of
from hotloop.lowering.pipeline.piece_costs import Around
from hotloop.lowering.pipeline.relay import Ahead, Relay, Station, leaf_name, runs
from hotloop.lowering.transforms.precision import numbers
from hotloop.task import Computed


class Conveyor:
    """Runs batches through the stages of all ranks, of which this one has some.

    torch's pipelines take microbatches of one shape. So a batch, or what is left of one, that comes in another is
    exported, cut and run by itself; the result is the same.

    Attributes:
        own: the stages of this rank.
    """

    def __init__(self, parts: Ingredients, objective: Objective, holding: Holding, ahead: Ahead | None) -> None:
        self._parts, self._objective, self._holding, self._ahead = parts, objective, holding, ahead
        self.own = own_stages(parts)
        self._chains: dict[Any, Chain] = {}
        self._relays: dict[Any, Relay] = {}
        self._heard: list[tuple[Tensor, ...]] = []

    def sizes(self, samples: int) -> list[tuple[int, int]]:
        """First row and number of rows of each microbatch."""
        found, first = [], 0
        for count, rows in self._runs(samples):
            found += [(first + place * rows, rows) for place in range(count)]
            first += count * rows
        return found

    def __call__(self, leaves: Leaves, shares: Tensor | None = None) -> list[Computed]:
        """Forward, and backward with `shares`: what each microbatch's loss counts of the batch's, (microbatches,).

        Returns:
            What came of each microbatch, on the rank that has the last stage; empty on the others.
        """
        training, first, done = shares is not None, 0, 0
        found: list[Computed] = []
        every = self._runs(len(leaves[0]))
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

    def _runs(self, samples: int) -> list[tuple[int, int]]:
        """`(microbatches, rows of each)`; an evaluation's batch may be larger than what fits at once."""
        parts, size = self._parts, self._parts.roles.batch_size
        blocks = [min(size, samples - first) for first in range(0, samples, size)]
        return [run for block in blocks for run in runs(block, rows_of(parts), parts.plan.pipeline, parts.world.ranks)]

    def _draw(self, leaves: Leaves, rows: int, training: bool) -> None:
        if self._ahead is not None:
            chain = self._chain([leaf[:rows] for leaf in leaves], training)
            self._ahead.draw([seen.drawings for seen in chain.rehearsed], rows, len(leaves[0]))

    def _ready(self, like: Leaves, count: int, training: bool) -> tuple[Chain, Relay]:
        chain, parts = self._chain(like, training), self._parts
        if (id(chain), count) not in self._relays:
            loss = _part_of_the_loss if training else None
            stations = [self._station(chain, stage) for stage in self.own]
            self._relays[id(chain), count] = Relay(
                stations, len(chain.pieces), parts.device, parts.plan.pipeline, count, loss
            )
        return chain, self._relays[id(chain), count]

    def _chain(self, like: Leaves, training: bool) -> Chain:
        shape = (training, *((leaf.shape, leaf.dtype) for leaf in like))
        if shape not in self._chains:
            self._chains[shape] = self._cut(like, training)
        return self._chains[shape]

    def _cut(self, like: Leaves, training: bool) -> Chain:
        with self._holding.on_host(), torch.enable_grad():
            samples = [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in like]
            chain = Chain.of(self._parts, self._objective.train(training), samples)
        for stage in self.own:
            strange = [name for name in held_by(chain.pieces[stage]) if name not in self._holding.own]
            if strange:
                raise PlanError(
                    f"parallel=stages: for {len(like[0])} samples {'in training' if training else 'in evaluation'}"
                    f" stage {stage} uses {strange[0]!r}, which belongs to another",
                    expected="the same modules in the same order, whatever the batch",
                    fix="use parallel=sharded",
                )
        return chain

    def _station(self, chain: Chain, stage: int) -> Station:
        piece, seen = chain.pieces[stage], chain.rehearsed[stage]
        _move(piece, self._parts.device)
        given = partial(self._ahead.given, stage) if self._ahead is not None else _as_they_come
        heard = self._heard if stage == len(chain.pieces) - 1 else None
        leading = [value.requires_grad for value in seen.leaving]
        module = _Stage(piece, partial(numbers, self._parts), given, leading, heard)
        return Station(stage, module, piece.leaves, seen.arriving, seen.leaving)


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
        piece: Piece,
        around: Around,
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


def own_stages(parts: Ingredients) -> range:
    """The stages of this rank."""
    return range(parts.world.rank, stages_of(parts), parts.world.ranks)


def _part_of_the_loss(left: Any, share: Tensor) -> Tensor:
    """Of what left the last stage the loss, counted as the microbatch counts; a mean of nothing counts nothing."""
    loss = left[0] if isinstance(left, Sequence) else left
    return torch.where(share[0] == 0, 0.0, loss * share[0].to(loss.dtype))


def _as_they_come(first: int, rows: int) -> AbstractContextManager[None]:
    return nullcontext()


def _move(piece: Piece, device: torch.device) -> None:
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
