"""Statistics of paired windows: median ratio, confidence interval, and verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hotloop.margins import FAR_BEHIND, FAR_SLOWER, FIRST_PAIRS, MARGIN

SpeedVerdict = Literal["faster", "slower", "no difference"]

CONFIDENCE = 0.99
"""Confidence of the interval. With 0.95 a race of several plans would be wrong too often."""

MIN_PAIRS = 8
"""Least number of pairs for an interval: with 7 pairs the confidence is only 1 - 2 / 2**7 = 0.984."""

ENOUGH_PAIRS = 12
"""Pairs before a result counts as precise."""

_DROP_PAIRS = 2
"""Pairs after which a plan that is far slower than the best is dropped."""

_NARROW = 0.02
_NARROWEST = 0.01
_CLEARLY_SLOWER_RATIO = 1.1


@dataclass(frozen=True)
class Ratio:
    """The baseline's time divided by a plan's: median over `pairs` pairs, and interval, None with too few pairs."""

    median: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def half_width(self) -> float:
        """Half the interval's width relative to the median; infinite without an interval."""
        return math.inf if self.low is None or self.high is None else (self.high - self.low) / (2 * self.median)


def ratio_of(baseline: Sequence[float], own: Sequence[float], confidence: float | None = None) -> Ratio:
    """Returns the median ratio of paired times with its interval, by default of 99 % confidence.

    The ends are order statistics by the binomial distribution (Conover, Practical Nonparametric Statistics, 3rd ed.,
    section 3.2), valid for any distribution of independent pairs at a fixed number of pairs: 99 % from 8 pairs, 95 %
    from 6. A bootstrap interval is too narrow with few pairs.

    Args:
        baseline, own: seconds of a step in each pair, above zero; surplus values of the longer one are ignored.
    """
    count = min(len(baseline), len(own))
    ratios = np.sort(np.asarray(baseline[:count]) / np.asarray(own[:count]))
    median = float(np.median(ratios))
    # The number of ratios below the interval, and above it, plus one.
    tail = (1 - (CONFIDENCE if confidence is None else confidence)) / 2
    coins = (math.comb(count, heads) for heads in range(count + 1))
    beyond = sum(chance < tail * 2**count for chance in itertools.accumulate(coins))
    if beyond < 1:
        return Ratio(median, None, None, count)
    return Ratio(median, float(ratios[beyond - 1]), float(ratios[count - beyond]), count)


def verdict_of(ratio: Ratio) -> SpeedVerdict | None:
    """Returns `faster` or `slower` if the whole interval is beyond the margin; None with too few pairs.

    `no difference` means that none was shown; the interval may be too wide, see `spans_margin`.
    """
    if ratio.low is None or ratio.high is None:
        return None
    if ratio.low > 1 + MARGIN:
        return "faster"
    return "slower" if ratio.high < 1 / (1 + MARGIN) else "no difference"


def spans_margin(ratio: Ratio) -> bool:
    """Whether the interval includes an end of the margin, so that more pairs could change the verdict."""
    if ratio.low is None or ratio.high is None:
        return True
    return any(ratio.low <= limit <= ratio.high for limit in (1 / (1 + MARGIN), 1 + MARGIN))


def could_win(ratio: Ratio) -> bool:
    """Whether a plan may be faster than the baseline; such a plan wins if faster plans fail their proofs."""
    if ratio.low is None or ratio.high is None:
        return True
    return ratio.low <= 1 + MARGIN <= ratio.high and ratio.half_width > _NARROWEST


def is_precise(ratio: Ratio) -> bool:
    """Whether the interval is narrow, and on one side of each margin or as narrow as is useful.

    Repeated tests find chance differences; the margin and the least number of pairs keep these rare.
    """
    if ratio.pairs < ENOUGH_PAIRS or ratio.half_width > _NARROW:
        return False
    return ratio.half_width <= _NARROWEST or not spans_margin(ratio)


def is_clearly_slower(ratio: Ratio, best: Ratio) -> bool:
    """Whether the whole interval of a plan is clearly below the interval of the best."""
    if ratio.high is None or best.low is None or ratio.pairs < ENOUGH_PAIRS:
        return False
    return ratio.high * _CLEARLY_SLOWER_RATIO < best.low


def can_be_dropped(ratio: Ratio, best: Ratio) -> bool:
    """Whether a search drops a plan that is behind the best; a wrong decision costs little."""
    if ratio.pairs >= _DROP_PAIRS and ratio.median < best.median / FAR_SLOWER:
        return True
    behind = FAR_BEHIND if ratio.pairs < MIN_PAIRS else MARGIN
    return ratio.pairs >= FIRST_PAIRS and ratio.median < best.median * (1 - behind)


def is_fastest_known(ratios: Sequence[Ratio]) -> bool:
    """Whether the plan to take is known: the best is surely faster and no plan may beat it, or no plan is faster."""
    best = max(ratios, key=lambda one: one.median, default=None)
    if best is None:
        return True
    if verdict_of(best) != "faster":
        return all(one.high is not None and one.high < 1 + MARGIN for one in ratios)
    return all(one is best or (one.high or math.inf) < best.median * (1 + MARGIN) for one in ratios)


def decided_groups(groups: Mapping[str, Sequence[Ratio]]) -> set[str]:
    """Returns the groups whose plan to take is known.

    If one group has a surely faster plan, another group without a promising plan isn't worth more time.
    """
    known = {name for name, found in groups.items() if is_fastest_known(found)}
    if not any(verdict_of(one) == "faster" for name in known for one in groups[name]):
        return known
    little = 1 + FAR_BEHIND
    return known | {
        name for name, found in groups.items() if all(one.pairs >= MIN_PAIRS and one.median < little for one in found)
    }
