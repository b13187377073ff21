"""How a model is split into stages: where it can be cut, where that is best, and the chain of pieces that comes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hotloop.core.format import digits
from hotloop.data.batch_tree import batch_length, tensors
from hotloop.data.feeds.feed import peek
from hotloop.errors import PlanError
from hotloop.lowering.context import Ingredients
from hotloop.lowering.pipeline.graph_split import Leaves, Objective, Piece, Traced
from hotloop.lowering.pipeline.piece_costs import Cost, Rehearsed, best_cuts, measure, rehearse
from hotloop.lowering.pipeline.relay import CHUNKS
from hotloop.lowering.transforms.accumulation import check_pieces
from hotloop.lowering.transforms.precision import numbers

AUTO = "auto"
_PER_RANK = 4
"""Microbatches for each rank unless the plan says how many: then at most a fifth of the time is spent on filling and
draining (Huang et al.: GPipe, 2019, section 2.3)."""
_USED = 0.9
"""Of a device's free memory; the rest is for what can't be counted beforehand."""


@dataclass(frozen=True)
class Chain:
    """The model in stages, for a microbatch of one shape."""

    traced: Traced
    pieces: tuple[Piece, ...]
    rehearsed: tuple[Rehearsed, ...]

    @classmethod
    def of(cls, parts: Ingredients, objective: Objective, leaves: Leaves) -> Chain:
        """Cut where the plan says.

        Raises:
            PlanError: the model can't be exported, or can't be cut there.
        """
        traced = Traced.of(objective, leaves)
        pieces = traced.cut(places(traced, parts.plan.split))
        return cls(traced, tuple(pieces), tuple(rehearse(pieces, leaves, parts.device, partial(numbers, parts))))

    def holders(self, ranks: int) -> dict[str, set[int]]:
        """The ranks that use each parameter and buffer."""
        found: dict[str, set[int]] = {}
        for stage, piece in enumerate(self.pieces):
            for name in held_by(piece):
                found.setdefault(name, set()).add(stage % ranks)
        return found


def held_by(piece: Piece) -> list[str]:
    """The model's parameters and buffers in a piece, by their names there."""
    values = itertools.chain(piece.body.named_parameters(), piece.body.named_buffers())
    return [name.removeprefix("model.") for name, _ in values if name.startswith("model.")]


def stages_of(parts: Ingredients) -> int:
    """How many stages there are in all."""
    return parts.world.ranks * (CHUNKS if parts.plan.pipeline == "interleaved" else 1)


def rows_of(parts: Ingredients) -> int:
    """Samples of a microbatch; the last of a batch may have fewer."""
    assert parts.plan.microbatches is not None
    return -(-parts.roles.batch_size // parts.plan.microbatches)


def example(parts: Ingredients, rows: int) -> list[Tensor]:
    """Tensors of a batch of so many samples, on the CPU: the first ones, as often as it takes."""
    batch = peek(parts.roles, rows)
    number = torch.arange(rows) % batch_length(batch)
    return [leaf[number] for leaf in tensors(batch)]


def settled(parts: Ingredients, objective: Objective) -> Ingredients:
    """The plan with what it left open: the number of microbatches, and where the stages begin.

    Raises:
        PlanError: the model can't be cut into so many stages, or a batch into so many microbatches.
    """
    plan = parts.plan
    microbatches = plan.microbatches or min(parts.roles.batch_size, _PER_RANK * parts.world.ranks)
    parts = replace(parts, plan=plan.with_axes(microbatches=microbatches))
    _check_modules(parts.model)
    parts.world.from_first(lambda: _check_rows(parts))
    split, lines = parts.world.from_first(lambda: _measured(parts, objective))
    for line in lines:
        parts.say(line)
    return replace(parts, plan=parts.plan.with_axes(split=split))


def places(traced: Traced, split: str) -> list[int]:
    """The nodes that stages begin with, by the names of a plan.

    Raises:
        PlanError: there is no such module, or no cut can be made before it.
    """
    found = []
    for name in split.split(","):
        place = traced.find(name) if name else None
        if place is None:
            known = ", ".join(list(traced.beginnings())[:8])
            raise PlanError(
                f"split={split}, and the forward pass of the model uses no module {name!r}",
                expected=f"modules that it uses, such as {known or 'none of this model'}",
                fix="check the spelling, or use split=auto",
            )
        if traced.bound(place):
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


def _measured(parts: Ingredients, objective: Objective) -> tuple[str, list[str]]:
    """Where stages begin, as names with commas between, and what to tell of them."""
    stages = stages_of(parts)
    leaves = example(parts, rows_of(parts))
    traced = Traced.of(objective.train(), leaves)
    split = parts.plan.split
    if split == AUTO:
        beginnings = traced.beginnings()
    else:
        names = split.split(",")
        if len(names) != stages - 1:
            raise PlanError(
                f"split={split} names {len(names)} beginnings of stages, and there are {stages} stages",
                expected=f"{stages - 1}: the first stage begins with the model",
                fix="name as many, or use split=auto",
            )
        beginnings = dict(zip(names, places(traced, split), strict=True))
    if len(beginnings) < stages - 1:
        raise PlanError(
            f"the model can't be cut into {stages} stages: stages can begin with "
            + (", ".join(map(repr, beginnings)) or "none of its modules")
            + " alone",
            expected="a chain of modules with parameters, each used after the one before",
            fix=_fewer_stages(parts, len(beginnings) + 1),
        )
    with parts.during("measuring the layers", counted=False):
        costs = measure(traced.cut(list(beginnings.values())), leaves, parts.device, partial(numbers, parts))
    cuts = best_cuts(costs, stages, _room(parts), partial(_in_flight, parts))
    if cuts is None:
        raise PlanError(
            f"no split of the model into {stages} stages has room in the memory of {parts.device}: its parameters with"
            f" gradients and optimizer state take {_mib(sum(cost.weights for cost in costs))}",
            fix="use more ranks, or more microbatches",
        )
    names = list(beginnings)
    begun = [names[cut - 1] for cut in cuts]
    return ",".join(begun), _lines(parts, costs, cuts, begun)


def _fewer_stages(parts: Ingredients, most: int) -> str:
    """Returns the advice for a model that can be cut into at most so many stages."""
    ranks = most // (stages_of(parts) // parts.world.ranks)
    advice = [f"--ranks {ranks}"] if ranks > 1 else []
    advice += ["pipeline=1f1b"] if parts.plan.pipeline == "interleaved" and most > 1 else []
    return f"use {' or '.join([*advice, 'parallel=data'])}"


def _lines(parts: Ingredients, costs: Sequence[Cost], cuts: Sequence[int], names: Sequence[str]) -> list[str]:
    """What went to which rank."""
    total = sum(cost.seconds for cost in costs) or 1.0
    found = []
    for stage, (first, last) in enumerate(itertools.pairwise([0, *cuts, len(costs)])):
        begin = f"from {names[stage - 1]!r}" if stage else "from the beginning"
        end = f"up to {names[stage]!r}" if stage < len(names) else "to the end"
        share = sum(cost.seconds for cost in costs[first:last]) / total
        weights = _mib(sum(cost.weights for cost in costs[first:last]))
        rank = stage % parts.world.ranks
        found.append(f"stage {stage} on rank {rank}, {begin} {end}: {share:.0%} of the time, {weights} to train")
    return found


def _mib(count: float) -> str:
    return f"{digits(count / 2**20)} MiB"


def _room(parts: Ingredients) -> float:
    """Bytes that a stage may take; on a CPU, whose memory all ranks share, a split wins none."""
    if parts.device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(parts.device)
    return _USED * free * parts.world.ranks / stages_of(parts)


def _in_flight(parts: Ingredients, stage: int) -> int:
    """Of how many microbatches a stage keeps what backward needs."""
    microbatches = parts.plan.microbatches or 1
    return microbatches if parts.plan.pipeline == "gpipe" else min(microbatches, stages_of(parts) - stage)


def _check_modules(model: nn.Module) -> None:
    """Refuses what a graph of operators can't follow."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise PlanError(
                f"parallel=stages with {name or 'the model'}, which keeps a state of its own (get_extra_state)",
                expected="modules whose state is in parameters and buffers, which a graph can hold",
                fix="use parallel=data",
            )


def _check_rows(parts: Ingredients) -> None:
    """Refuses a model that looks at the batch as a whole, where there are several microbatches."""
    microbatches, few = parts.plan.microbatches, min(4, parts.roles.batch_size)
    if microbatches == 1 or few == 1:
        return
    batch = peek(parts.roles, few)
    asked = f"microbatches={microbatches}"
    check_pieces(parts, batch, batch_length(batch), 2, asked, "use microbatches=1", wide=False)
    objective = parts.task.objective
    if parts.task.weight is None and not (objective.sums_samples or objective.cross_entropy):
        parts.say(
            f"{asked}: microbatches are compared with the batch on the first samples alone; a loss that divides by what a batch "
            "holds, such as unpadded targets, needs a weight(batch)"
        )
