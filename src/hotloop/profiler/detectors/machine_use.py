"""Small batches, numbers of threads, and memory that is returned to the OS after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from hotloop.core.records.profile import Remedy
from hotloop.profiler.detectors.data_loading import loading_wait_ms
from hotloop.profiler.detectors.step import COMPUTING_PHASES, ProfiledStep

_MIN_SHARE = 0.2  # least share of calls in the step; larger than the error of the measurement
_ENOUGH_SAMPLES = 32  # batch size above which a larger batch gains little per sample
_TINY_BATCH = 4  # batch size up to which a larger batch is a remedy beside others
_PROPOSED_FACTOR = 2  # least factor of the proposed batch size, which is at least `_ENOUGH_SAMPLES`


def small_batch(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a larger batch as a remedy if calls take most of the step.

    Times of calls are compared with the time of the samples' work: few long sequences may be much work per call. Calls
    with another remedy, such as those of a loop, aren't counted. Lines that start a trainer are.
    """
    samples = step.profile.samples_per_step
    if not samples:
        return
    updating = step.operators(lambda one: one.phase == "update" and one.where in step.named)  # a single line is enough
    phases = [phase for phase in COMPUTING_PHASES if not (updating and phase == "update")]
    others = step.named - step.trainer_lines
    ones = step.operators(lambda one: one.phase in phases and one.where not in others)
    calling = sum(step.reclaimable_ms(one) for one in ones) + _batch_fetch_ms(step, samples)
    if step.share(calling) < _MIN_SHARE or calling < samples / _ENOUGH_SAMPLES * (step.ms - calling):
        return
    wanted, most = max(_PROPOSED_FACTOR, _ENOUGH_SAMPLES / samples), _max_factor(step, samples)
    factor = min(wanted, most)
    if factor <= 1:
        return
    many = f"{samples * factor:.0f}" + " or more" * (wanted < most)
    loader = next((use.where for use in step.profile.loaders), "")
    yield Remedy(
        cause=f"too small a batch: {samples:.0f} samples in a step",
        where=loader or step.profile.step_where,
        remedy=f"a batch of {many} samples (which changes the training: tune the learning rate again)",
        gain=step.share((1 - 1 / factor) * calling),
        evidence=f"{calling:.2f} ms of each step of {step.ms:.2f} ms are spent on calling operations and on work for "
        "each batch, whose times hardly grow with the number of samples",
    )


def can_stay(step: ProfiledStep) -> bool:
    """Returns whether the batch is large enough to omit the note beside other remedies."""
    return (step.profile.samples_per_step or 0.0) >= _ENOUGH_SAMPLES


def as_note_beside(step: ProfiledStep, small: Remedy, others: Sequence[Remedy]) -> Remedy:
    """Makes the remedy a note if others keep the training as it is, unless the batch is tiny."""
    samples = step.profile.samples_per_step or 0.0
    return small.model_copy(update={"note": bool(others) and samples > _TINY_BATCH})


def _max_factor(step: ProfiledStep, samples: float) -> float:
    """Returns the largest factor of the batch size that the data set allows."""
    if step.profile.one_batch:
        return 1.0
    known = [(use.samples, use.batch_size) for use in step.profile.loaders if use.samples]
    return max((have / samples if size else float(have) for have, size in known), default=inf)


def _batch_fetch_ms(step: ProfiledStep, samples: float) -> float:
    """Returns the milliseconds that a batch costs to fetch beside its samples.

    Returns 0 for data sets that make whole batches, whose time per sample is unknown, and for many samples.
    """
    loaders = step.profile.loaders
    if samples >= _ENOUGH_SAMPLES or any(use.sample_ms is None for use in loaders):
        return 0.0
    made = sum((1.0 if use.at_once else samples) * (use.sample_ms or 0.0) for use in loaders)
    return max(0.0, loading_wait_ms(step) - made)


def too_many_threads(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy if operations use more threads than cores."""
    threads = step.profile.threads
    if threads is None or threads.slower is None or not step.on_cpu:
        return
    computing = step.phase(*COMPUTING_PHASES)
    yield Remedy(
        cause=f"too many threads: {threads.torch} of torch's on {threads.cores} cores",
        where=threads.where or step.profile.step_where,
        remedy=f"torch.set_num_threads({threads.cores}), or OMP_NUM_THREADS={threads.cores}",
        gain=step.share(computing * (1 - 1 / threads.slower)),
        evidence=f"operations are cut into {threads.torch} pieces and wait for the last of them: these operations take "
        f"{threads.slower:.1f} times as long as with {threads.cores}, and operations are {computing:.2f} ms of "
        f"each step of {step.ms:.2f} ms",
        axes={"threads": threads.cores},
    )


def idle_cores(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for idle cores, for Tasks only: a race must measure whether more threads help."""
    threads = step.profile.threads
    if threads is None or not step.profile.plan or not step.on_cpu:
        return
    free = threads.cores - round(threads.others)
    if threads.torch >= free:
        return
    computing = step.phase(*COMPUTING_PHASES)
    yield Remedy(
        cause=f"idle cores: torch uses {threads.torch} of {threads.cores}",
        where=threads.where or step.profile.step_where or step.profile.source,
        remedy=f"torch.set_num_threads({free})",
        gain=step.share(computing * (1 - threads.torch / free)),
        evidence=f"{threads.busy:.1f} cores were busy while operations took {computing:.2f} ms of each step of "
        f"{step.ms:.2f} ms; a race measures whether more threads make them faster",
        axes={"threads": free},
    )


_PAGE_US = 2.0  # most time to zero and map a page, in us; servers take 1 to 2 us


def memory_returned_to_os(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy if the C library returns freed blocks: the OS zeroes their pages again in each step."""
    paging, threads = step.profile.paging, step.profile.threads
    if paging is None or not step.on_cpu:
        return
    took = min(paging.system_ms, paging.pages * _PAGE_US / 1e3)
    yield Remedy(
        cause="memory is given back to the system after each step, and requested again in the next",
        where=step.profile.step_where or step.profile.source,
        remedy="keep the memory in the process: start the script with MALLOC_MMAP_MAX_=0 "
        "MALLOC_TRIM_THRESHOLD_=100000000000 in the environment",
        gain=step.share(took / max(1.0, threads.busy if threads else 1.0)),
        evidence=f"in each step of {step.ms:.2f} ms the system hands out {paging.pages:,.0f} pages, each zeroed, and takes "
        f"{paging.system_ms:.2f} ms of processors' time",
        axes={"allocator": "keep"},
    )
