"""Too small a batch: a step that is the same work however few samples are in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from hotloop.diagnosing.feeding import waited_ms
from hotloop.diagnosing.step import COMPUTING, Step
from hotloop.profiles import Remedy

_LEAST = 0.2
"""Share of the step that calling must take: as much as what bounds a step, and more than what is known of it may be wrong by."""

_AMORTISED = 32
"""Samples whose work takes longer than all that calling costs are enough: a larger batch wins less with each."""

_TINY = 4
"""So few samples are too few whatever else there is."""

_LARGER = 2
"""Times as many samples are proposed, and at least `_AMORTISED`."""


def too_small(step: Step) -> Iterator[Remedy]:
    """Steps that are made of calls: a larger batch shares them among more samples.

    What counts is the time of the calls, as it was measured, beside that of the samples' own work: a few long sequences are
    few samples, but much work in each call. Calls that something else is said of, such as a loop, aren't the batch's fault,
    and the loop's own Python may take longer for more samples. Of a line that hands the training over, nothing is said
    as a whole.
    """
    samples = step.profile.samples_per_step
    if not samples:
        return
    updating = step.operators(lambda one: one.phase == "update" and one.where in step.named)  # one line stands for all
    phases = [phase for phase in COMPUTING if not (updating and phase == "update")]
    others = step.named - step.handed
    ones = step.operators(lambda one: one.phase in phases and one.where not in others)
    calling = sum(step.reclaimable(one) for one in ones) + _fetching(step, samples)
    if step.share(calling) < _LEAST or calling < samples / _AMORTISED * (step.ms - calling):
        return
    wanted, most = max(_LARGER, _AMORTISED / samples), _most(step, samples)
    factor = min(wanted, most)
    if factor <= 1:
        return
    many = f"{samples * factor:.0f}" + " or more" * (wanted < most)
    loader = next((use.where for use in step.profile.loaders), "")
    yield Remedy(
        cause=f"too small a batch: {samples:.0f} samples in a step",
        where=loader or step.profile.step_where,
        remedy=f"a batch of {many} samples (which changes the training: try the learning rate anew)",
        gain=step.share((1 - 1 / factor) * calling),
        evidence=f"{calling:.2f} ms of each step of {step.ms:.2f} ms are spent on calling operations and on what comes with each batch, "
        "which hardly takes longer for more of them",
    )


def may_stay(step: Step) -> bool:
    """Whether there are so many samples that nothing is said of them beside anything else that is to be mended."""
    return (step.profile.samples_per_step or 0.0) >= _AMORTISED


def after(step: Step, small: Remedy, others: Sequence[Remedy]) -> Remedy:
    """A note beside what is to be mended and leaves the training as it is, unless the batch is tiny."""
    samples = step.profile.samples_per_step or 0.0
    return small.model_copy(update={"note": bool(others) and samples > _TINY})


def _most(step: Step, samples: float) -> float:
    """So many times as many samples there are: what is trained on all of them at a time can't get more."""
    if step.profile.one_batch:
        return 1.0
    known = [(use.samples, use.batch_size) for use in step.profile.loaders if use.samples]
    return max((have / samples if size else float(have) for have, size in known), default=inf)


def _fetching(step: Step, samples: float) -> float:
    """What a batch costs to fetch beside its samples, which more of them would cost as well; ms.

    Of data sets that make a whole batch at once nobody knows how its time grows, so it counts as the samples'. And of many
    samples, it's mostly for each of them that a loader does what it does.
    """
    loaders = step.profile.loaders
    if samples >= _AMORTISED or any(use.sample_ms is None for use in loaders):
        return 0.0
    made = sum((1.0 if use.at_once else samples) * (use.sample_ms or 0.0) for use in loaders)
    return max(0.0, waited_ms(step) - made)
