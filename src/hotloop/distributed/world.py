"""A rank's view of the processes that share a training: its number, collective exchanges and comparison of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hotloop.core.state import State, digest_of, tree_leaves
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
"""Parts of the errors that gloo, NCCL and torch's store raise after another process ended; none names the process."""


@dataclass(frozen=True)
class World:
    """The number of this process among the ranks; the exchanges of a single process return at once.

    Attributes:
        rank: number of this process, from 0; rank 0 writes the run and prints.
        ranks: number of processes.
    """

    rank: int = 0
    ranks: int = 1

    @classmethod
    def from_group(cls, plan: Plan) -> World:
        """Returns the ranks of the process group, see `join_process_group`; a single rank for a plan of one process.

        Raises:
            PlanError: the plan needs ranks, and this process has no process group.
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
        """Whether this process writes and prints."""
        return self.rank == 0

    def broadcast_object(self, make: Callable[[], T]) -> T:
        """Returns on all ranks the pickled result of `make` on rank 0, or raises its HotloopError on all ranks."""
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
        """Returns the values of all ranks, by rank."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Returns the largest value over the ranks of each number."""
        if self.is_single:
            return list(numbers)
        largest = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def broadcast_int(self, number: int) -> int:
        """Returns the number of rank 0."""
        return self.all_reduce_max([number if self.is_rank_zero else -(1 << 62)])[0]


SINGLE_RANK = World()


def is_rank_loss(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, reports that another rank ended."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(s in text for s in _LOST_MESSAGES)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def rank_loss_error(error: Exception, rank: int) -> RankLostError | None:
    """Returns the RankLostError for an error after the end of another rank; None for other errors."""
    if isinstance(error, RankLostError):
        return error
    if isinstance(error, HotloopError) or not is_rank_loss(error):
        return None
    return RankLostError(f"rank {rank} lost another rank ({' '.join(str(error).split())})")


_COMPARED_PARTS = ("data", "validation", "test", "collate")
"""Root attributes whose differences aren't reported: each rank reads its own samples."""


def check_in_step(world: World, state: State) -> list[str]:
    """Compares a State with those of the other ranks, bit by bit.

    Returns:
        A line for each plain value in an attribute that differs: a checkpoint stores the value of rank 0 alone.

    Raises:
        OutOfStepError: with the first part that differs, and its rank.
    """
    if world.is_single:
        return []
    content = vars(state) | {"position": (), "attributes": (), "named": ()}
    of_ranks = world.all_gather(
        (
            {path: digest_of(value) for path, value in tree_leaves(content)},
            {place: digest_of(value) for place, value in (state.attributes or {}).items()}
            | {f"state{path}": digest_of(value) for path, value in tree_leaves(state.named)},
        )
    )
    first, first_attributes = of_ranks[0]
    for rank, (digests, _) in enumerate(of_ranks):
        if differing := _differing_parts(first, digests):
            what = differing[0].strip("/").replace("/", " ", 1)
            raise OutOfStepError(
                f"after step {state.position.step} rank {rank} and rank 0 differ in {what!r}"
                + (f" and {len(differing) - 1} more" if differing[1:] else ""),
                expected="the same on all ranks",
                fix="use parallel=none: something in the model depends on the samples of a rank, or on random numbers",
            )
    places = dict.fromkeys(place for _, digests in of_ranks for place in _differing_parts(first_attributes, digests))
    return [
        f"{place.replace('/', '.')} has another value on each rank, and a checkpoint stores that of rank 0"
        for place in places
        if place.split("/")[0] not in _COMPARED_PARTS
    ]


def _differing_parts(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]
