"""Whether the ranks still hold the same numbers, as they must after each step that they take together."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from hotloop.errors import OutOfStepError
from hotloop.parallel.world import World
from hotloop.state import State, bits, leaves

_READ = ("data", "validation", "test", "collate")
"""Roots of attributes that may differ: each rank reads samples of its own."""


def check_in_step(world: World, state: State) -> None:
    """Compares a State with those of the other ranks, bit by bit.

    Raises:
        OutOfStepError: naming what differs first, and on which rank.
    """
    if world.alone:
        return
    shared = {name: value for name, value in (state.attributes or {}).items() if name.split("/")[0] not in _READ}
    content = vars(state) | {"position": (), "attributes": shared}
    of_ranks = world.gathered({path: _digest(value) for path, value in leaves(content)})
    first = of_ranks[0]
    for rank, digests in enumerate(of_ranks):
        odd = [path for path in first | digests if first.get(path) != digests.get(path)]
        if odd:
            what = odd[0].strip("/").replace("/", " ", 1)
            raise OutOfStepError(
                f"after step {state.position.step} rank {rank} and rank 0 differ in {what!r}"
                + (f" and {len(odd) - 1} more" if odd[1:] else ""),
                expected="the same on all ranks",
                fix="use parallel=none: something in the model depends on which samples a rank sees, or on chance",
            )


def _digest(value: Any) -> bytes:
    content = bits(value).numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
