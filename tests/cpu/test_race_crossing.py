"""From which size on a plan pays, and what decides it: on times that follow a known law."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hotloop.measuring.crossing import Point, crossing
from hotloop.verdicts import Timing

SIZES = (0.25, 1.0, 4.0, 16.0)
Law = Callable[[float], float]


def gpu(size: float) -> float:
    """Milliseconds: launches, and a little arithmetic."""
    return 2.0 + 0.02 * size**2


def cpu(size: float) -> float:
    return 1.0 * size**2


def points(law: Law, baseline: Law, spread: float = 0.05, feed: Law = lambda size: 0.0) -> list[Point]:
    found = []
    for size in SIZES:
        ratio = baseline(size) / law(size)
        found.append(
            (
                size,
                Timing(
                    name="p",
                    step_ms=law(size),
                    ratio=ratio,
                    ratio_low=ratio * (1 - spread),
                    ratio_high=ratio * (1 + spread),
                    feed_ms=feed(size),
                ),
            )
        )
    return found


def test_where_a_gpu_overtakes_a_cpu() -> None:
    found = crossing("cuda", points(gpu, cpu), points(cpu, cpu))
    assert found.at is not None and found.low is not None and found.high is not None
    assert 1.0 < found.low < found.at < found.high < 4.0
    assert found.at == pytest.approx(2.0**0.5, rel=0.2)  # where 2 + 0.02 s^2 = s^2
    assert "cuda: launches, Python and threads decide, its time hardly grows from 0.25 to 4" in found.reason
    assert "the baseline: arithmetic and memory decide" in found.reason


def test_between_two_sizes_a_power_law_is_found_exactly() -> None:
    found = crossing("p", points(lambda s: 3.0, lambda s: s), points(lambda s: s, lambda s: s))
    assert found.at == pytest.approx(3.0)


def test_the_other_way_round_it_is_the_same_size() -> None:
    there, back = (
        crossing("x", points(one, other), points(other, other)).at for one, other in ((gpu, cpu), (cpu, gpu))
    )
    assert there == pytest.approx(back)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_no_crossing_where_one_is_always_faster(factor: float) -> None:
    found = crossing("p", points(lambda s: factor * cpu(s), cpu), points(cpu, cpu))
    assert (found.at, found.low, found.high) == (None, None, None)


def test_an_interval_that_does_not_cross_everywhere_gives_none() -> None:
    found = crossing("p", points(lambda s: 15.0, lambda s: s, spread=0.3), points(lambda s: s, lambda s: s))
    assert found.at == pytest.approx(15.0) and found.low is None and found.high is None


def test_a_size_at_which_it_failed_is_left_out() -> None:
    own, base = points(gpu, cpu), points(cpu, cpu)
    own[0] = (SIZES[0], Timing(name="p", failure="out of memory"))
    assert crossing("p", own, base).at == pytest.approx(crossing("p", points(gpu, cpu), base).at)
    own[1:] = [(size, Timing(name="p", failure="out of memory")) for size in SIZES[1:]]
    found = crossing("p", own, base)
    assert found.at is None and "too few sizes" in found.reason


def test_copies_are_told() -> None:
    found = crossing("p", points(gpu, cpu, feed=lambda s: 0.9 * gpu(s)), points(cpu, cpu))
    assert "p: the copy and loading of batches decide;" in found.reason
