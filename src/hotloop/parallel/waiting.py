"""Which rank the others wait for: the one that waits least itself."""

from __future__ import annotations

from hotloop.parallel.world import World

_WORTH_A_LINE = 0.2
"""Share of the time; ranks that wait less for each other have little to win by more even work."""


def slowest(world: World, waited_s: float, train_s: float) -> str:
    """A line that names the slowest rank of an epoch, where the others waited long for it; empty elsewhere.

    Args:
        waited_s: seconds that this rank waited for the others after its forward passes.
        train_s: seconds that the epoch's steps took.
    """
    if world.alone:
        return ""
    waited = world.gathered(waited_s)
    last = min(range(world.ranks), key=waited.__getitem__)
    lost = max(waited) - waited[last]
    if lost < _WORTH_A_LINE * train_s:
        return ""
    return f"rank {last} is the slowest: others waited {lost / train_s:.0%} of the epoch for it"
