"""Work between regular steps, such as the episodes that reinforcement learning plays before it trains on them."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.profiler.detectors.step import ProfiledStep, percent

_LARGE_SHARE = 0.2  # share of the time from which on gains of a step say too little about the whole run


def irregular_work_note(step: ProfiledStep) -> Iterator[str]:
    """Yields a line if irregular work takes a large share of the time. Gains count for regular steps only."""
    steps_s = step.profile.steps * step.ms / 1e3
    other_s = step.profile.apart.other_s
    share = other_s / (steps_s + other_s) if steps_s else 0.0
    if share >= _LARGE_SHARE:
        yield (
            f"Other work between steps takes {percent(share)} of the time. Gains count for regular steps, which take "
            f"{percent(1 - share)}."
        )
