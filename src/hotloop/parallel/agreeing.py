"""Whether the ranks still hold the same numbers, as they must after each step that they take together."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from hotloop.errors import OutOfStepError
from hotloop.parallel.world import World
from hotloop.state import State, bits, leaves

_READ = ("data", "validation", "test", "collate")
"""Roots of attributes that differ without a report: each rank reads samples of its own."""


def check_in_step(world: World, state: State) -> list[str]:
    """Compares a State with those of the other ranks, bit by bit.

    Returns:
        A line for each plain value in an attribute that differs: a checkpoint stores the value of rank 0 alone.

    Raises:
        OutOfStepError: naming what differs first, and on which rank.
    """
    if world.alone:
        return []
    content = vars(state) | {"position": (), "attributes": ()}
    of_ranks = world.gathered(
        (_digests(content), {place: _digest(value) for place, value in (state.attributes or {}).items()})
    )
    first, first_attributes = of_ranks[0]
    for rank, (digests, _) in enumerate(of_ranks):
        if odd := _different(first, digests):
            what = odd[0].strip("/").replace("/", " ", 1)
            raise OutOfStepError(
                f"after step {state.position.step} rank {rank} and rank 0 differ in {what!r}"
                + (f" and {len(odd) - 1} more" if odd[1:] else ""),
                expected="the same on all ranks",
                fix="use parallel=none: something in the model depends on which samples a rank sees, or on chance",
            )
    places = dict.fromkeys(place for _, own in of_ranks for place in _different(first_attributes, own))
    return [
        f"{place.replace('/', '.')} is another value on each rank, and a checkpoint stores that of rank 0"
        for place in places
        if place.split("/")[0] not in _READ
    ]


def _different(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


def _digests(content: dict[str, Any]) -> dict[str, bytes]:
    return {path: _digest(value) for path, value in leaves(content)}


def _digest(value: Any) -> bytes:
    content = bits(value).numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
