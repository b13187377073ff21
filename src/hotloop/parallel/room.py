"""Whether there is memory for as many processes as were asked for."""

from __future__ import annotations

import torch

from hotloop.errors import PlanError
from hotloop.probe.room import room_bytes, size

OWN_BYTES, FORK_BYTES = 256 << 20, 50 << 20
"""That a rank takes at least, for Python and torch alone: as a process of its own, and as a fork that shares most of it."""


def check_room(processes: int, each_bytes: int, what: str = "ranks") -> None:
    """Without memory for all of them the system would kill processes, and not only these.

    Raises:
        PlanError: there is none.
    """
    room = room_bytes(torch.device("cpu"))
    if processes * each_bytes > room:
        raise PlanError(
            f"{processes} {what}, with {size(room)} of memory free",
            expected=f"at most {max(1, room // each_bytes)}, since each takes {size(each_bytes)} before it trains",
            fix="use fewer, at most one for each core or device",
        )
