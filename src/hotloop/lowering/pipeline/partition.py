"""Split of a model into stages: possible cuts, the best cuts, and the resulting chain of pieces."""

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
from hotloop.lowering.transforms.accumulation import check_pieces
from hotloop.lowering.transforms.precision import autocast_context

AUTO = "auto"
_MICROBATCHES_PER_RANK = 4
"""Default microbatches per rank: at most a fifth of the time then goes to filling and draining (Huang et al.: GPipe,
2019, section 2.3)."""
_MEMORY_SHARE = 0.9
"""Share of a device's free memory for a stage; the rest is a reserve for unknown needs."""


@dataclass(frozen=True)
class StageChain:
    """The model in stages, for microbatches of one shape."""

    traced: TracedForward
    pieces: tuple[GraphPiece, ...]
    piece_shapes: tuple[PieceShape, ...]

    @classmethod
    def from_plan(cls, parts: LoweringContext, objective: LossModule, leaves: TensorLeaves) -> StageChain:
        """Splits the model as the plan says.

        Raises:
            PlanError: the model can't be exported, or can't be cut there.
        """
        traced = TracedForward.from_task(objective, leaves)
        pieces = traced.split(cut_positions(traced, parts.plan.split))
        shapes = infer_piece_shapes(pieces, leaves, parts.device, partial(autocast_context, parts))
        return cls(traced, tuple(pieces), tuple(shapes))

    def stage_holders(self) -> dict[str, set[int]]:
        """Returns the ranks that use each parameter and buffer."""
        holders: dict[str, set[int]] = {}
        for stage, piece in enumerate(self.pieces):
            for name in names_in_piece(piece):
                holders.setdefault(name, set()).add(stage)
        return holders


def names_in_piece(piece: GraphPiece) -> list[str]:
    """Returns the names of the model's parameters and buffers in a piece."""
    values = itertools.chain(piece.body.named_parameters(), piece.body.named_buffers())
    return [name.removeprefix("model.") for name, _ in values if name.startswith("model.")]


def microbatch_rows(parts: LoweringContext) -> int:
    """Returns the samples of a microbatch; the last of a batch may have fewer."""
    assert parts.plan.microbatches is not None
    return -(-parts.splits.batch_size // parts.plan.microbatches)


def example_leaves(parts: LoweringContext, rows: int) -> list[Tensor]:
    """Returns the tensors of a batch with `rows` samples on the CPU; the first samples repeat if there are too few."""
    batch = first_batch(parts.splits, rows)
    number = torch.arange(rows) % batch_length(batch)
    return [leaf[number] for leaf in tree_tensors(batch)]


def resolve_split(parts: LoweringContext, objective: LossModule) -> LoweringContext:
    """Returns the plan with the number of microbatches and the first modules of the stages.

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
    """Returns the first nodes of the stages that a plan names.

    Raises:
        PlanError: there is no such module, or no cut is possible before it.
    """
    places = []
    for name in split.split(","):
        place = traced.find(name) if name else None
        if place is None:
            known = ", ".join(list(traced.cut_points())[:8])
            raise PlanError(
                f"split={split}, and the forward pass of the model uses no module {name!r}",
                expected=f"modules that it uses, such as {known or 'none of this model'}",
                fix="check the spelling, or use split=auto",
            )
        if traced.separates_mutation(place):
            raise PlanError(
                f"split={split}: {name!r} changes in place what was computed before it, so both must be in one stage",
                fix="begin the stage elsewhere, use inplace=False there, or use split=auto",
            )
        places.append(place)
    if sorted({*places, 0}) != [0, *places]:
        raise PlanError(
            f"split={split}, and the forward pass doesn't call these modules in that order, after others",
            fix="name the first module of the second stage, then of the third, and so on, or use split=auto",
        )
    return places


def _measure_split(parts: LoweringContext, objective: LossModule) -> tuple[str, list[str]]:
    """Returns the names of the stages' first modules, with commas between, and the lines to report."""
    stages = parts.world.ranks
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
            fix=f"use --ranks {len(beginnings) + 1} or parallel=data" if beginnings else "use parallel=data",
        )
    with parts.during("measuring the layers", counted=False):
        costs = measure_pieces(
            traced.split(list(beginnings.values())), leaves, parts.device, partial(autocast_context, parts)
        )
    cuts = find_best_cuts(costs, stages, _stage_memory_bytes(parts), partial(_microbatches_in_flight, parts))
    if cuts is None:
        raise PlanError(
            f"no split of the model into {stages} stages fits into the memory of {parts.device}: its parameters with"
            f" gradients and optimizer state take {_format_mib(sum(cost.weights for cost in costs))}",
            fix="use more ranks, or more microbatches",
        )
    names = list(beginnings)
    first_modules = [names[cut - 1] for cut in cuts]
    return ",".join(first_modules), _describe_split(costs, cuts, first_modules)


def _describe_split(costs: Sequence[PieceCost], cuts: Sequence[int], names: Sequence[str]) -> list[str]:
    total = sum(cost.seconds for cost in costs) or 1.0
    lines = []
    for stage, (first, last) in enumerate(itertools.pairwise([0, *cuts, len(costs)])):
        begin = f"from {names[stage - 1]!r}" if stage else "from the beginning"
        end = f"up to {names[stage]!r}" if stage < len(names) else "to the end"
        share = sum(cost.seconds for cost in costs[first:last]) / total
        weights = _format_mib(sum(cost.weights for cost in costs[first:last]))
        lines.append(f"stage {stage} on rank {stage}, {begin} {end}: {share:.0%} of the time, {weights} to train")
    return lines


def _format_mib(count: float) -> str:
    return f"{format_digits(count / 2**20)} MiB"


def _stage_memory_bytes(parts: LoweringContext) -> float:
    """Returns the bytes that a stage may take; unlimited on a CPU, whose memory all ranks share."""
    if parts.device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(parts.device)
    return _MEMORY_SHARE * free


def _microbatches_in_flight(parts: LoweringContext, stage: int) -> int:
    microbatches = parts.plan.microbatches or 1
    return microbatches if parts.plan.pipeline == "gpipe" else min(microbatches, parts.world.ranks - stage)


def _check_modules(model: nn.Module) -> None:
    """Rejects modules with a state outside the exported graph."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise PlanError(
                f"parallel=stages with {name or 'the model'}, which keeps a state of its own (get_extra_state)",
                expected="modules whose state is in parameters and buffers, which a graph can hold",
                fix="use parallel=data",
            )


def _check_rows(parts: LoweringContext) -> None:
    """Rejects a model that doesn't treat rows separately, if there are several microbatches."""
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
