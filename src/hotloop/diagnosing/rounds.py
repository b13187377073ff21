"""Rounds: how often a step goes through a line of the user's, as its operators and Python say."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hotloop.diagnosing.step import grouped
from hotloop.profiles import OperatorTime

LOOP = 8
"""So often must a line call the same operation in a step to be a loop."""


def rounds_of(ones: Sequence[OperatorTime]) -> float:
    """How often a line is gone through in a step: as often as the rarest of the operations that it repeats.

    Views don't count: a single call of a library's layer, such as attention, looks at its tensors from many sides. And it
    is gone through no more often than Python ran it: a loop of a library's own is none of the user's to change.
    """
    working = [one for one in ones if not is_view(one)]
    first = [one for one in working if one.phase in ("forward", "loss", "batch", "python")] or working
    if any(one.phase == "update" for one in first):
        return 0.0
    counts = [sum(one.calls for one in same) for same in grouped(first, _same).values()]
    runs = max((one.line_runs for one in ones if one.line_runs is not None), default=inf)
    repeated = [count for count in counts if count >= LOOP]
    return min(*repeated, runs) if repeated and runs >= LOOP else 0.0


def is_view(one: OperatorTime) -> bool:
    return not (one.bytes or one.flops or one.bytes is None)


def _same(one: OperatorTime) -> tuple[str, str, str]:
    """What a loop repeats: of one module, or of many that do the same to one input, as heads do and stacked layers don't."""
    if one.alike >= LOOP:
        return "", one.name, " ".join(one.shapes)
    return one.module, one.name, ""
