"""What pairs of windows say: the median of their ratios, its interval, and a verdict of three."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hotloop.core.records.race import FAR_BEHIND, FAR_SLOWER, FIRST_PAIRS, MARGIN

SpeedVerdict = Literal["faster", "slower", "no difference"]

CONFIDENCE = 0.99
"""Of the interval. A race has several plans and each verdict is acted upon, so 1 in 20 would be wrong too often."""

MIN_PAIRS = 8
"""With fewer, no two of the ratios enclose the true median as often: 1 - 2 / 2**7 is only 0.984."""

ENOUGH_PAIRS = 12
"""What is looked at before it is said to be enough."""

_DROP_PAIRS = 2
"""Enough of a plan that is far slower than the best."""

_NARROW = 0.02
_NARROWEST = 0.01
_CLEARLY_SLOWER_RATIO = 1.1


@dataclass(frozen=True)
class Ratio:
    """The baseline's time over a plan's; above 1 the plan is faster.

    Attributes:
        median: over the pairs of windows.
        low, high: ends of its interval; None with too few pairs.
        pairs: how many there are.
    """

    median: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a share of the median; infinite without an interval."""
        return math.inf if self.low is None or self.high is None else (self.high - self.low) / (2 * self.median)


def ratio_of(baseline: Sequence[float], own: Sequence[float], confidence: float | None = None) -> Ratio:
    """Median ratio of paired times with its interval, of 99 % unless asked otherwise.

    The interval is the one between two of the sorted ratios that the binomial distribution gives (Conover, Practical
    Nonparametric Statistics, 3rd edition, section 3.2). It holds the true median in at least 99 of 100 cases whatever
    the distribution of the noise, from 8 pairs on (95 of 100 from 6 on), as long as the pairs don't depend on each other,
    and nobody waited for the interval to come out as it did.
    A bootstrap is narrower with few pairs, and then promises too much.

    Args:
        baseline, own: seconds of a step in each pair, above zero; pairs beyond the shorter of the two don't count.
    """
    from scipy.special import bdtr  # takes a while, and a training that races nothing does without

    count = min(len(baseline), len(own))
    ratios = np.sort(np.asarray(baseline[:count]) / np.asarray(own[:count]))
    median = float(np.median(ratios))
    # How many ratios lie below the interval, and above it, plus one.
    tail = (1 - (CONFIDENCE if confidence is None else confidence)) / 2
    beyond = int(np.searchsorted(bdtr(np.arange(count + 1), count, 0.5), tail))
    if beyond < 1:
        return Ratio(median, None, None, count)
    return Ratio(median, float(ratios[beyond - 1]), float(ratios[count - beyond]), count)


def verdict_of(ratio: Ratio) -> SpeedVerdict | None:
    """`faster` or `slower` if the whole interval is, by more than the margin; None with too few pairs to say.

    `no difference` says that none was shown: either there is none worth a change, or the interval is too wide to tell;
    see `spans_margin`.
    """
    if ratio.low is None or ratio.high is None:
        return None
    if ratio.low > 1 + MARGIN:
        return "faster"
    return "slower" if ratio.high < 1 / (1 + MARGIN) else "no difference"


def spans_margin(ratio: Ratio) -> bool:
    """Whether the interval reaches across the margin, so that more pairs could change the answer."""
    if ratio.low is None or ratio.high is None:
        return True
    return any(ratio.low <= limit <= ratio.high for limit in (1 / (1 + MARGIN), 1 + MARGIN))


def could_win(ratio: Ratio) -> bool:
    """Whether it isn't known yet if a plan is faster than the baseline: it wins if what is ahead of it fails its proof."""
    if ratio.low is None or ratio.high is None:
        return True
    return ratio.low <= 1 + MARGIN <= ratio.high and ratio.half_width > _NARROWEST


def is_precise(ratio: Ratio) -> bool:
    """Whether enough was measured: the interval is narrow, and on one side of each margin or as narrow as is useful.

    What is looked at again and again would be found different by chance some time; the margin and a least number of
    pairs keep that rare.
    """
    if ratio.pairs < ENOUGH_PAIRS or ratio.half_width > _NARROW:
        return False
    return ratio.half_width <= _NARROWEST or not spans_margin(ratio)


def is_clearly_slower(ratio: Ratio, best: Ratio) -> bool:
    """Whether a plan can't become the best any more: its whole interval lies clearly below that of the best."""
    if ratio.high is None or best.low is None or ratio.pairs < ENOUGH_PAIRS:
        return False
    return ratio.high * _CLEARLY_SLOWER_RATIO < best.low


def can_be_dropped(ratio: Ratio, best: Ratio) -> bool:
    """Whether a search can leave a plan out, which costs it little where that is wrong: it is behind the best so far."""
    if ratio.pairs >= _DROP_PAIRS and ratio.median < best.median / FAR_SLOWER:
        return True
    behind = FAR_BEHIND if ratio.pairs < MIN_PAIRS else MARGIN
    return ratio.pairs >= FIRST_PAIRS and ratio.median < best.median * (1 - behind)


def is_fastest_known(ratios: Sequence[Ratio]) -> bool:
    """Whether it is known which plan to take: one is surely faster, and no other faster than it; or none is faster."""
    best = max(ratios, key=lambda one: one.median, default=None)
    if best is None:
        return True
    if verdict_of(best) != "faster":
        return all(one.high is not None and one.high < 1 + MARGIN for one in ratios)
    return all(one is best or (one.high or math.inf) < best.median * (1 + MARGIN) for one in ratios)


def decided_groups(groups: Mapping[str, Sequence[Ratio]]) -> set[str]:
    """Groups of plans of which it is known which to take.

    Where one of them has a plan that is surely faster, another in which nothing seems to win much isn't worth more time.
    """
    known = {name for name, found in groups.items() if is_fastest_known(found)}
    if not any(verdict_of(one) == "faster" for name in known for one in groups[name]):
        return known
    little = 1 + FAR_BEHIND
    return known | {
        name for name, found in groups.items() if all(one.pairs >= MIN_PAIRS and one.median < little for one in found)
    }
