"""How many plans there is memory for at a time."""

from __future__ import annotations

import torch

from hotloop.probe.room import room_bytes
from hotloop.records import TaskFacts

_EACH = 28
"""Bytes for each parameter: it, its gradient, two figures of an optimizer, and the copy that the State goes back to."""

_SHARE = 0.6
"""Of the free memory; the rest is for what a step computes with, and for the proof."""


def plans_at_once(facts: TaskFacts, device: str) -> int:
    """Of one Task, beside those that are there already."""
    return int(_SHARE * room_bytes(torch.device(device)) / (_EACH * max(1, facts.parameters)))


def in_groups(wanted: list[str], size: int) -> list[list[str]]:
    """As few groups as there must be, of about the same size; none of more than `size`, which is 1 at least."""
    count = -(-len(wanted) // max(1, size))
    return [wanted[number::count] for number in range(count)]
