"""How a model is split into stages: where it can be cut, where that is best, and the chain of pieces that comes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hotloop.core.format import format_digits
from hotloop.data.batch_tree import batch_length, tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.pipeline.graph_split import GraphPiece, LossModule, TensorLeaves, TracedForward
from hotloop.lowering.pipeline.piece_costs import (
    PieceCost,
    PieceShape,
    find_best_cuts,
    infer_piece_shapes,
    measure_pieces,
)
from hotloop.lowering.pipeline.relay import STAGES_PER_RANK
from hotloop.lowering.transforms.accumulation import check_pieces
from hotloop.lowering.transforms.precision import autocast_context

AUTO = "auto"
_MICROBATCHES_PER_RANK = 4
"""Microbatches for each rank unless the plan says how many: then at most a fifth of the time is spent on filling and
draining (Huang et al.: GPipe, 2019, section 2.3)."""
_MEMORY_SHARE = 0.9
"""Of a device's free memory; the rest is for what can't be counted beforehand."""


@dataclass(frozen=True)
class StageChain:
    """The model in stages, for a microbatch of one shape."""

    traced: TracedForward
    pieces: tuple[GraphPiece, ...]
    piece_shapes: tuple[PieceShape, ...]

    @classmethod
    def from_plan(cls, parts: LoweringContext, objective: LossModule, leaves: TensorLeaves) -> StageChain:
        """Cut where the plan says.

        Raises:
            PlanError: the model can't be exported, or can't be cut there.
        """
        traced = TracedForward.from_task(objective, leaves)
        pieces = traced.split(cut_positions(traced, parts.plan.split))
        return cls(
            traced,
            tuple(pieces),
            tuple(infer_piece_shapes(pieces, leaves, parts.device, partial(autocast_context, parts))),
        )

    def stage_holders(self, ranks: int) -> dict[str, set[int]]:
        """The ranks that use each parameter and buffer."""
        found: dict[str, set[int]] = {}
        for stage, piece in enumerate(self.pieces):
            for name in names_in_piece(piece):
                found.setdefault(name, set()).add(stage % ranks)
        return found


def names_in_piece(piece: GraphPiece) -> list[str]:
    """The model's parameters and buffers in a piece, by their names there."""
    values = itertools.chain(piece.body.named_parameters(), piece.body.named_buffers())
    return [name.removeprefix("model.") for name, _ in values if name.startswith("model.")]


def stage_count(parts: LoweringContext) -> int:
    """How many stages there are in all."""
    return parts.world.ranks * (STAGES_PER_RANK if parts.plan.pipeline == "interleaved" else 1)


def microbatch_rows(parts: LoweringContext) -> int:
    """Samples of a microbatch; the last of a batch may have fewer."""
    assert parts.plan.microbatches is not None
    return -(-parts.splits.batch_size // parts.plan.microbatches)


def example_leaves(parts: LoweringContext, rows: int) -> list[Tensor]:
    """Tensors of a batch of so many samples, on the CPU: the first ones, as often as it takes."""
    batch = first_batch(parts.splits, rows)
    number = torch.arange(rows) % batch_length(batch)
    return [leaf[number] for leaf in tree_tensors(batch)]


def resolve_split(parts: LoweringContext, objective: LossModule) -> LoweringContext:
    """The plan with what it left open: the number of microbatches, and where the stages begin.

    Raises:
        PlanError: the model can't be cut into so many stages, or a batch into so many microbatches.
    """
    plan = parts.plan
    microbatches = plan.microbatches or min(parts.splits.batch_size, _MICROBATCHES_PER_RANK * parts.world.ranks)
    parts = replace(parts, plan=plan.with_axes(microbatches=microbatches))
    _check_modules(parts.model)
    parts.world.broadcast_object(lambda: _check_rows(parts))
    split, lines = parts.world.broadcast_object(lambda: _measure_split(parts, objective))
    for line in lines:
        parts.say(line)
    return replace(parts, plan=parts.plan.with_axes(split=split))


def cut_positions(traced: TracedForward, split: str) -> list[int]:
    """The nodes that stages begin with, by the names of a plan.

    Raises:
        PlanError: there is no such module, or no cut can be made before it.
    """
    found = []
    for name in split.split(","):
        place = traced.find(name) if name else None
        if place is None:
            known = ", ".join(list(traced.cut_points())[:8])
            raise PlanError(
                f"split={split}, and the forward pass of the model uses no module {name!r}",
                expected=f"modules that it uses, such as {known or 'none of this model'}",
                fix="check the spelling, or use split=auto",
            )
        if traced.bind(place):
            raise PlanError(
                f"split={split}: {name!r} changes in place what was computed before it, so both must be in one stage",
                fix="begin the stage elsewhere, use inplace=False there, or use split=auto",
            )
        found.append(place)
    if sorted({*found, 0}) != [0, *found]:
        raise PlanError(
            f"split={split}, and the forward pass doesn't come to these modules in that order, after others",
            fix="name the first module of the second stage, then of the third, and so on, or use split=auto",
        )
    return found


def _measure_split(parts: LoweringContext, objective: LossModule) -> tuple[str, list[str]]:
    """Where stages begin, as names with commas between, and what to tell of them."""
    stages = stage_count(parts)
    leaves = example_leaves(parts, microbatch_rows(parts))
    traced = TracedForward.from_task(objective.train(), leaves)
    split = parts.plan.split
    if split == AUTO:
        beginnings = traced.cut_points()
    else:
        names = split.split(",")
        if len(names) != stages - 1:
            raise PlanError(
                f"split={split} names {len(names)} beginnings of stages, and there are {stages} stages",
                expected=f"{stages - 1}: the first stage begins with the model",
                fix="name as many, or use split=auto",
            )
        beginnings = dict(zip(names, cut_positions(traced, split), strict=True))
    if len(beginnings) < stages - 1:
        raise PlanError(
            f"the model can't be cut into {stages} stages: stages can begin with "
            + (", ".join(map(repr, beginnings)) or "none of its modules")
            + " alone",
            expected="a chain of modules with parameters, each used after the one before",
            fix=_fewer_stages(parts, len(beginnings) + 1),
        )
    with parts.during("measuring the layers", counted=False):
        costs = measure_pieces(
            traced.split(list(beginnings.values())), leaves, parts.device, partial(autocast_context, parts)
        )
    cuts = find_best_cuts(costs, stages, _stage_memory_bytes(parts), partial(_microbatches_in_flight, parts))
    if cuts is None:
        raise PlanError(
            f"no split of the model into {stages} stages has room in the memory of {parts.device}: its parameters with"
            f" gradients and optimizer state take {_format_mib(sum(cost.weights for cost in costs))}",
            fix="use more ranks, or more microbatches",
        )
    names = list(beginnings)
    begun = [names[cut - 1] for cut in cuts]
    return ",".join(begun), _describe_split(parts, costs, cuts, begun)


def _fewer_stages(parts: LoweringContext, most: int) -> str:
    """Returns the advice for a model that can be cut into at most so many stages."""
    ranks = most // (stage_count(parts) // parts.world.ranks)
    advice = [f"--ranks {ranks}"] if ranks > 1 else []
    advice += ["pipeline=1f1b"] if parts.plan.pipeline == "interleaved" and most > 1 else []
    return f"use {' or '.join([*advice, 'parallel=data'])}"


def _describe_split(
    parts: LoweringContext, costs: Sequence[PieceCost], cuts: Sequence[int], names: Sequence[str]
) -> list[str]:
    """What went to which rank."""
    total = sum(cost.seconds for cost in costs) or 1.0
    found = []
    for stage, (first, last) in enumerate(itertools.pairwise([0, *cuts, len(costs)])):
        begin = f"from {names[stage - 1]!r}" if stage else "from the beginning"
        end = f"up to {names[stage]!r}" if stage < len(names) else "to the end"
        share = sum(cost.seconds for cost in costs[first:last]) / total
        weights = _format_mib(sum(cost.weights for cost in costs[first:last]))
        rank = stage % parts.world.ranks
        found.append(f"stage {stage} on rank {rank}, {begin} {end}: {share:.0%} of the time, {weights} to train")
    return found


def _format_mib(count: float) -> str:
    return f"{format_digits(count / 2**20)} MiB"


def _stage_memory_bytes(parts: LoweringContext) -> float:
    """Bytes that a stage may take; on a CPU, whose memory all ranks share, a split wins none."""
    if parts.device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(parts.device)
    return _MEMORY_SHARE * free * parts.world.ranks / stage_count(parts)


def _microbatches_in_flight(parts: LoweringContext, stage: int) -> int:
    """Of how many microbatches a stage keeps what backward needs."""
    microbatches = parts.plan.microbatches or 1
    return microbatches if parts.plan.pipeline == "gpipe" else min(microbatches, stage_count(parts) - stage)


def _check_modules(model: nn.Module) -> None:
    """Refuses what a graph of operators can't follow."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise PlanError(
                f"parallel=stages with {name or 'the model'}, which keeps a state of its own (get_extra_state)",
                expected="modules whose state is in parameters and buffers, which a graph can hold",
                fix="use parallel=data",
            )


def _check_rows(parts: LoweringContext) -> None:
    """Refuses a model that looks at the batch as a whole, where there are several microbatches."""
    microbatches, few = parts.plan.microbatches, min(4, parts.splits.batch_size)
    if microbatches == 1 or few == 1:
        return
    batch = first_batch(parts.splits, few)
    asked = f"microbatches={microbatches}"
    check_pieces(parts, batch, batch_length(batch), 2, asked, "use microbatches=1", wide=False)
    objective = parts.task.objective
    if parts.task.weight is None and not (objective.sums_samples or objective.cross_entropy):
        parts.say(
            f"{asked}: microbatches are compared with the batch on the first samples alone; a loss that divides by what a batch "
            "holds, such as unpadded targets, needs a weight(batch)"
        )
