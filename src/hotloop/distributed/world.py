"""The ranks that share a training, as one of them sees it: who it is, and how all come to one mind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hotloop.core.state import State, bytes_of, tree_leaves
from hotloop.errors import HotloopError, OutOfStepError, PlanError, RankLostError
from hotloop.plan import Plan

T = TypeVar("T")

_LOST_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "failed to recv",
    "connection was likely closed",
    "nccl communicator was aborted",
    "remote process exited",
)
"""What gloo, NCCL and torch's store say where another process is gone; none of them says which."""


@dataclass(frozen=True)
class World:
    """Where this process stands among the ranks; alone, all that the ranks would have to say to each other is said.

    Attributes:
        rank: this process, from 0; the first writes the run and speaks to the user.
        ranks: how many there are.
    """

    rank: int = 0
    ranks: int = 1

    @classmethod
    def from_group(cls, plan: Plan) -> World:
        """The ranks that this process has joined, see `joining`; itself alone under a plan of one process.

        Raises:
            PlanError: the plan is for ranks, and this process is none.
        """
        if not plan.ranked:
            return SINGLE_RANK
        if not dist.is_initialized():
            raise PlanError(
                f"parallel={plan.parallel} in a single process",
                expected="ranks, which `hotloop train` and `hotloop.fit` start",
                fix="train with it, or use parallel=none here",
            )
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_single(self) -> bool:
        return self.ranks == 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def broadcast_object(self, make: Callable[[], T]) -> T:
        """What `make` gives on the first rank, on all of them; an error that it raises there, too.

        What it gives is pickled on its way, which is between processes of one training alone.
        """
        if self.is_single:
            return make()
        made: list[Any] = [None, None]
        if self.is_rank_zero:
            try:
                made[0] = make()
            except HotloopError as error:
                made[1] = error
        dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def all_gather(self, value: T) -> list[T]:
        """What each rank has, by rank, on all of them."""
        if self.is_single:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Number by number, the largest that a rank has."""
        if self.is_single:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def broadcast_int(self, number: int) -> int:
        """A number of the first rank's, on all of them."""
        return self.all_reduce_max([number if self.is_rank_zero else -(1 << 62)])[0]


SINGLE_RANK = World()


def is_rank_loss(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, is that another rank is gone."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(s in text for s in _LOST_MESSAGES)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def rank_loss_error(error: Exception, rank: int) -> RankLostError | None:
    """An error of a rank as what it says of another one that is gone; None where it says something else."""
    if isinstance(error, RankLostError):
        return error
    if isinstance(error, HotloopError) or not is_rank_loss(error):
        return None
    return RankLostError(f"rank {rank} lost another rank ({' '.join(str(error).split())})")


_COMPARED_PARTS = ("data", "validation", "test", "collate")
"""Roots of attributes that differ without a report: each rank reads samples of its own."""


def check_in_step(world: World, state: State) -> list[str]:
    """Compares a State with those of the other ranks, bit by bit.

    Returns:
        A line for each plain value in an attribute that differs: a checkpoint stores the value of rank 0 alone.

    Raises:
        OutOfStepError: naming what differs first, and on which rank.
    """
    if world.is_single:
        return []
    content = vars(state) | {"position": (), "attributes": ()}
    of_ranks = world.all_gather(
        (_part_digests(content), {place: _digest(value) for place, value in (state.attributes or {}).items()})
    )
    first, first_attributes = of_ranks[0]
    for rank, (digests, _) in enumerate(of_ranks):
        if odd := _differing_parts(first, digests):
            what = odd[0].strip("/").replace("/", " ", 1)
            raise OutOfStepError(
                f"after step {state.position.step} rank {rank} and rank 0 differ in {what!r}"
                + (f" and {len(odd) - 1} more" if odd[1:] else ""),
                expected="the same on all ranks",
                fix="use parallel=none: something in the model depends on which samples a rank sees, or on chance",
            )
    places = dict.fromkeys(place for _, own in of_ranks for place in _differing_parts(first_attributes, own))
    return [
        f"{place.replace('/', '.')} is another value on each rank, and a checkpoint stores that of rank 0"
        for place in places
        if place.split("/")[0] not in _COMPARED_PARTS
    ]


def _differing_parts(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


def _part_digests(content: dict[str, Any]) -> dict[str, bytes]:
    return {path: _digest(value) for path, value in tree_leaves(content)}


def _digest(value: Any) -> bytes:
    content = bytes_of(value).numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
