"""Too small a batch: a step that is the same work however few samples are in it."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.diagnosing.step import COMPUTING, Step
from hotloop.profiles import Remedy

_FEW = 32
"""Samples from which on a batch is never called too small."""

_LARGER = 8
"""Times as many samples are proposed, and at most `_FEW` times as many as there are."""


def too_small(step: Step) -> Iterator[Remedy]:
    """Steps of few samples that are made of calls: a larger batch shares them among more samples.

    What is won is the time of the calls, as it was measured, however many samples there are: a few long sequences are few
    samples, but much work in each call. Calls that something else is said of, such as a loop, aren't the batch's fault, and
    the loop's own Python may take longer for more samples.
    """
    samples = step.profile.samples_per_step
    if samples is None or samples >= _FEW:
        return
    ones = step.operators(lambda one: one.phase in COMPUTING and one.where not in step.named)
    calling = sum(step.reclaimable(one) for one in ones) + _fetching(step, samples)
    factor = max(_LARGER, _FEW / samples)
    loader = next((use.where for use in step.profile.loaders), "")
    yield Remedy(
        cause=f"too small a batch: {samples:.0f} samples in a step",
        where=loader or step.profile.step_where,
        remedy=f"a batch of {samples * factor:.0f} or more samples (which changes the training: try the learning rate anew)",
        gain=step.share((1 - 1 / factor) * calling),
        evidence=f"{calling:.2f} ms of each step of {step.ms:.2f} ms are spent on calling operations and on what comes with each batch, "
        "which hardly takes longer for more of them",
    )


def _fetching(step: Step, samples: float) -> float:
    """What a batch costs to fetch beside its samples, which more of them would cost as well; ms.

    Of data sets that make a whole batch at once nobody knows how its time grows, so it counts as the samples'.
    """
    loaders = step.profile.loaders
    if any(use.sample_ms is None for use in loaders):
        return 0.0
    made = sum((1.0 if use.at_once else samples) * (use.sample_ms or 0.0) for use in loaders)
    return max(0.0, step.phase("data") - made)
