"""What many steps come to: the same for phases and for modules, so that one adds up to the other."""

from __future__ import annotations

from collections.abc import Collection
from statistics import fmean

SEVERAL = 3.0
"""A step that takes so many times what others do was held up by something that isn't of every step."""

_CUT = 0.25


def middle_mean(values: Collection[float]) -> float:
    """The mean of the middle half.

    Like a median it isn't moved by steps that were held up, and unlike it sees what is done in every second step.
    """
    cut = int(_CUT * len(values))
    return fmean(sorted(values)[cut : len(values) - cut])
