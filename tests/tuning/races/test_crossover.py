"""From which size on a plan pays, and what decides it: on times that follow a known law."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hotloop.core.records.race import Crossover, RaceScaling, Timing, Verdict
from hotloop.report.race import scaling_sentence
from hotloop.tuning.races.crossover import Point, crossovers
from hotloop.tuning.races.statistics import Ratio, verdict_of

SIZES = (0.25, 1.0, 4.0, 16.0)
Law = Callable[[float], float]


def gpu(size: float) -> float:
    """Milliseconds: launches, and a little arithmetic."""
    return 2.0 + 0.02 * size**2


def cpu(size: float) -> float:
    return 1.0 * size**2


def points(law: Law, baseline: Law, spread: float = 0.05, feed: Law = lambda size: 0.0) -> list[Point]:
    return [(size, timed(baseline(size) / law(size), law(size), spread, feed(size))) for size in SIZES]


def timed(ratio: float | None, step_ms: float = 1.0, spread: float = 0.05, feed_ms: float = 0.0) -> Timing:
    """A plan as a race finds it; one that failed without a ratio."""
    if ratio is None:
        return Timing(name="p", failure="out of memory")
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    return Timing(
        name="p",
        step_ms=step_ms,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        feed_ms=feed_ms,
        verdict=verdict_of(Ratio(ratio, low, high, 20)),
    )


def crossing(name: str, own: list[Point], baseline: list[Point]) -> Crossover:
    """The only one."""
    [found] = crossovers(name, own, baseline)
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


def test_a_size_that_tells_nothing_claims_no_crossing() -> None:
    found = crossing("p", points(lambda s: 15.0, lambda s: s, spread=0.3), points(lambda s: s, lambda s: s))
    assert (found.at, found.low, found.high) == (None, None, None)


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


# --- what is said of them: the ratio at each size, with an interval of 5 %

SAID: dict[str, tuple[list[float | None], str]] = {
    "against itself, above 1": ([1.001, 1.004], "no difference between p and base was shown at any size raced"),
    "against itself, around 1": ([0.999, 1.002], "no difference between p and base was shown at any size raced"),
    "failed everywhere": ([None, None], "no difference between p and base was shown at any size raced"),
    "faster": ([1.5, 2.0], "p is faster than base at all sizes raced"),
    "slower": ([0.5, 0.6], "p is slower than base at all sizes raced"),
    "faster at some": ([1.01, 2.0, 3.0], "p is faster than base at s=2, 4; else no difference was shown"),
    "failed at the smallest": ([None, 0.5, 2.0], "p is faster than base above s=2.83 (between 2.76 and 2.9)"),
    "faster below": ([2.0, 0.5], "p is faster than base below s=1.41 (between 1.38 and 1.45)"),
    "undecided between": ([0.5, 1.01, 2.0], "p is faster than base above s=1.98 (between 1.89 and 2.09)"),
    "faster between": (
        [0.5, 2.0, 0.5],
        "p is faster than base above s=1.41 (between 1.38 and 1.45) and below s=2.83 (between 2.76 and 2.9)",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_follows_from_what_was_shown(name: str) -> None:
    ratios, says = SAID[name]
    sizes = [2.0**place for place in range(len(ratios))]
    own = [(size, timed(ratio)) for size, ratio in zip(sizes, ratios, strict=True)]
    base = [(size, timed(1.0).model_copy(update={"name": "base"})) for size in sizes]
    races = [
        Verdict(
            task="t",
            fingerprint="",
            plans=[b, p],
            baseline="base",
            winner=None,
            steps=None,
            machine="",
            versions={},
            seconds=1.0,
        )
        for (_, p), (_, b) in zip(own, base, strict=True)
    ]
    # The order in which they were asked for is another than that of sizes.
    turned = RaceScaling(
        parameter="s",
        values=[f"{size:g}" for size in reversed(sizes)],
        races=races[::-1],
        crossings=crossovers("p", own, base),
    )
    straight = RaceScaling(
        parameter="s", values=[f"{size:g}" for size in sizes], races=races, crossings=crossovers("p", own, base)
    )
    assert scaling_sentence(straight, "p") == says
    if "s=2, 4" not in says:
        assert scaling_sentence(turned, "p") == says
