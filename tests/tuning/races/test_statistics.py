"""What pairs of windows say: intervals that keep their promise under heavy-tailed noise, and a verdict of three."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import quantile_test

from hotloop.margins import MARGIN
from hotloop.tuning.races import statistics
from hotloop.tuning.races.statistics import (
    CONFIDENCE,
    Ratio,
    can_be_dropped,
    is_clearly_slower,
    is_fastest_known,
    is_precise,
    ratio_of,
    spans_margin,
    verdict_of,
)

RACES = 400


def disturbed(generator: np.random.Generator, pairs: int, step_s: float = 1.0) -> list[float]:
    """Times of a step on a machine where now and then something else comes in between, now and then for long."""
    usual = np.exp(generator.normal(0.0, 0.05, pairs))
    bursts = (generator.random(pairs) < 0.2) * generator.pareto(1.1, pairs)
    return list(step_s * (usual + bursts))


def covered(pairs: int) -> int:
    """In how many races the interval holds the true ratio, 1.25."""
    generator = np.random.default_rng(pairs)
    found = [ratio_of(disturbed(generator, pairs, 1.25), disturbed(generator, pairs)) for _ in range(RACES)]
    return sum(one.low <= 1.25 <= one.high for one in found if one.low is not None and one.high is not None)


LEAST = RACES * CONFIDENCE - 3 * (RACES * CONFIDENCE * (1 - CONFIDENCE)) ** 0.5
"""Three standard deviations below what an interval that just keeps its promise holds."""


@pytest.mark.parametrize("pairs", [8, 13, 60])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(pairs: int) -> None:
    assert covered(pairs) >= LEAST


def test_an_interval_that_promises_too_much_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(statistics, "CONFIDENCE", CONFIDENCE - 0.15)
    assert covered(40) < LEAST


def test_the_interval_narrows_with_the_pairs() -> None:
    generator = np.random.default_rng(0)
    widths = [ratio_of(disturbed(generator, n), disturbed(generator, n)).half_width for n in (12, 100, 800)]
    assert widths == sorted(widths, reverse=True) and widths[-1] < widths[0] / 4


@pytest.mark.parametrize("pairs", [8, 9, 30, 31, 200])
def test_the_interval_is_scipys(pairs: int) -> None:
    ratios = np.random.default_rng(pairs).normal(1.0, 0.1, pairs)
    exact = quantile_test(ratios, q=1.0, p=0.5).confidence_interval(CONFIDENCE)
    found = ratio_of(list(ratios), [1.0] * pairs)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


def test_bursts_do_not_move_the_ratio_as_they_move_the_mean() -> None:
    baseline, own = [1.0] * 20, [1.0] * 18 + [50.0, 80.0]
    assert ratio_of(baseline, own).median == 1.0 and np.mean(own) > 5


@pytest.mark.parametrize("pairs", [1, 7])
def test_too_few_pairs_say_nothing(pairs: int) -> None:
    found = ratio_of([3.0] * pairs, [1.0] * 9)
    assert (found.low, found.high, found.pairs) == (None, None, pairs)
    assert verdict_of(found) is None and not is_precise(found) and spans_margin(found)


def test_only_pairs_count() -> None:
    """A plan that stopped early is compared with the baseline's windows of the same rounds."""
    assert ratio_of([2.0] * 8 + [9.0] * 100, [1.0] * 8).median == 2.0


def interval(low: float, high: float, pairs: int = 40) -> Ratio:
    return Ratio((low + high) / 2, low, high, pairs)


EDGE = 1 + MARGIN
SAYS: dict[str, tuple[Ratio, str, bool]] = {
    "clearly faster": (interval(1.2, 1.3), "faster", False),
    "just faster": (interval(EDGE + 0.001, 1.1), "faster", False),
    "perhaps faster": (interval(EDGE - 0.001, 1.1), "no difference", True),
    "equal": (interval(0.995, 1.004), "no difference", False),
    "different, but not worth a word": (interval(1.005, 1.015), "no difference", False),
    "nobody knows": (interval(0.8, 1.3), "no difference", True),
    "perhaps slower": (interval(0.9, 1 / EDGE + 0.001), "no difference", True),
    "just slower": (interval(0.9, 1 / EDGE - 0.001), "slower", False),
}


@pytest.mark.parametrize("name", SAYS)
def test_the_verdict_of_three(name: str) -> None:
    ratio, says, open_question = SAYS[name]
    assert verdict_of(ratio) == says and spans_margin(ratio) == open_question


def test_the_verdict_is_the_same_from_either_side() -> None:
    """Who is the baseline makes no difference to what is found."""
    turned: dict[str | None, str] = {"faster": "slower", "slower": "faster", "no difference": "no difference"}
    for ratio, says, _ in SAYS.values():
        assert ratio.low and ratio.high
        assert verdict_of(Ratio(1 / ratio.median, 1 / ratio.high, 1 / ratio.low, ratio.pairs)) == turned[says]


ENOUGH: dict[str, tuple[Ratio, bool]] = {
    "narrow and clear": (interval(1.19, 1.21), True),
    "narrow, in few pairs": (interval(1.19, 1.21, pairs=8), False),
    "wide": (interval(1.1, 1.3), False),
    "narrow, across the margin": (interval(1.005, 1.035), False),
    "as narrow as is useful, across the margin": (interval(1.012, 1.028), True),
}


@pytest.mark.parametrize("name", ENOUGH)
def test_when_enough_was_measured(name: str) -> None:
    ratio, enough = ENOUGH[name]
    assert is_precise(ratio) == enough


BEHIND: dict[str, tuple[Ratio, Ratio, bool]] = {
    "far": (interval(0.5, 0.6), interval(1.0, 1.0), True),
    "a little": (interval(0.9, 0.95), interval(1.0, 1.0), False),
    "overlapping": (interval(0.5, 1.1), interval(1.0, 1.2), False),
    "few pairs": (interval(0.5, 0.6, pairs=7), interval(1.0, 1.0), False),
}


@pytest.mark.parametrize("name", BEHIND)
def test_who_can_no_longer_win(name: str) -> None:
    ratio, best, lost = BEHIND[name]
    assert is_clearly_slower(ratio, best) == lost


def wrong_answers(judge: Callable[[Ratio], object]) -> int:
    """Of races of a plan against itself, in which each new pair is looked at, how many end with a difference."""
    generator, wrong = np.random.default_rng(3), 0
    for _ in range(RACES):
        a, b = disturbed(generator, 60), disturbed(generator, 60)
        wrong += any(judge(ratio_of(a[:n], b[:n])) for n in range(8, 60, 3))
    return wrong


def test_looking_again_and_again_does_not_make_a_difference_out_of_noise() -> None:
    assert wrong_answers(lambda ratio: is_precise(ratio) and verdict_of(ratio) != "no difference") <= 0.01 * RACES
    assert wrong_answers(lambda ratio: ratio.low is not None and not ratio.low <= 1 <= (ratio.high or 0)) > 0.01 * RACES


def test_a_search_leaves_a_plan_out_that_is_behind_the_best_so_far() -> None:
    best = Ratio(1.3, None, None, 4)
    assert can_be_dropped(Ratio(1.2, None, None, 4), best)
    assert not can_be_dropped(Ratio(1.28, None, None, 4), best)  # too near, with so few pairs
    assert can_be_dropped(Ratio(1.25, 1.2, 1.3, 8), best)
    assert not can_be_dropped(Ratio(1.0, None, None, 3), best)  # too early


def test_the_fastest_is_known_once_nothing_else_can_be_it() -> None:
    sure, rival, none = Ratio(1.3, 1.2, 1.4, 8), Ratio(1.2, 1.1, 1.31, 8), Ratio(1.0, 0.9, 1.01, 8)
    assert is_fastest_known([sure, none])
    assert is_fastest_known([sure, rival])
    assert not is_fastest_known([sure, Ratio(1.25, 1.0, 1.5, 8)])  # it may be the faster one
    assert not is_fastest_known([Ratio(1.1, 0.9, 1.2, 8)])  # nothing is sure
    assert not is_fastest_known([Ratio(1.1, None, None, 4)])
    assert is_fastest_known([none])
    assert is_fastest_known([])
