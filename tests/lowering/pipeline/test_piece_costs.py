"""Where a chain is cut: against each possible split, tried one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotloop.lowering.pipeline.piece_costs import PieceCost, find_best_cuts

COSTS = st.lists(
    st.builds(
        PieceCost,
        seconds=st.integers(0, 20).map(float),
        weights=st.integers(0, 6),
        kept=st.integers(0, 4),
        arriving=st.integers(0, 9),
    ),
    min_size=1,
    max_size=8,
)


def splits(costs: list[PieceCost], stages: int, room: float) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Of each split with room: seconds of the slowest stage, bytes sent, and where it cuts."""
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        parts = [costs[a:b] for a, b in itertools.pairwise([0, *cuts, len(costs)])]
        needs = [sum(cost.weights + (stages - stage) * cost.kept for cost in part) for stage, part in enumerate(parts)]
        if max(needs) <= room:
            slowest = max(sum(cost.seconds for cost in part) for part in parts)
            yield slowest, sum(costs[cut].arriving for cut in cuts), cuts


# On a busy machine, making examples may take long.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(COSTS, st.integers(1, 4), st.sampled_from([math.inf, 30, 12]))
def test_no_other_split_is_better(costs: list[PieceCost], stages: int, room: float) -> None:
    tried = list(splits(costs, stages, room))
    found = find_best_cuts(costs, stages, room, lambda stage: stages - stage)
    if not tried:
        assert found is None
        return
    fastest = min(slowest for slowest, _, _ in tried)
    slowest, sent, _ = next(one for one in tried if one[2] == found)
    even = [one for one in tried if one[0] <= fastest * 1.05]
    assert slowest <= fastest * 1.05
    assert sent == min(one[1] for one in even)


def test_memory_can_move_a_cut() -> None:
    costs = [PieceCost(1.0, weights=5), PieceCost(1.0, weights=5), PieceCost(1.0), PieceCost(1.0)]
    assert find_best_cuts(costs, 2) == (2,)
    assert find_best_cuts(costs, 2, room=9) == (1,)
    assert find_best_cuts(costs, 2, room=4) is None
