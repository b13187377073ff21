"""Finds the bound of a step, the resource that takes most of its time, and how far cores, batch and ranks are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from hotloop.core.format import format_milliseconds
from hotloop.core.records.profile import OperatorTime, Remedy
from hotloop.core.records.profile_terms import Bound, Phase
from hotloop.profiler.detectors.data_loading import loading_wait_ms
from hotloop.profiler.detectors.step import COMPUTING_PHASES, ProfiledStep, is_product, operator_least_ms, percent
from hotloop.profiler.operator_cost import precision_in

_MIN_SHARE = 0.2  # least share of the step for a bound


def bound_times(step: ProfiledStep) -> dict[Bound, float]:
    """Returns the milliseconds of a step per bound; phases without known operators are left out."""
    found: dict[Bound, float] = {
        "input": step.phase("data", "batch"),
        "copy": step.phase("copy"),
        "synchronisation": step.phase("synchronisation"),
        "waiting": step.phase("waiting"),
        "communication": step.phase("communication"),
        "overhead": step.phase("python", "logging"),
        "memory bandwidth": 0.0,
        "arithmetic": 0.0,
    }
    for one in step.operators(lambda one: one.phase in COMPUTING_PHASES):
        calling = step.calling_ms(one)
        found["overhead"] += calling
        found[_operator_bound(step, one)] += step.cost_ms(one) - calling
    return found


def _operator_bound(step: ProfiledStep, one: OperatorTime) -> Bound:
    """Returns an operator's side of the roofline; without counts, products are arithmetic and others memory traffic."""
    limits = step.profile.limits
    rate = limits.flop_per_s.get(precision_in(one, step.profile.reduced))
    if one.flops is None or one.bytes is None or not rate or not limits.bytes_per_s:
        return "arithmetic" if is_product(one) else "memory bandwidth"
    return "arithmetic" if one.flops / rate > one.bytes / limits.bytes_per_s else "memory bandwidth"


def find_bound(step: ProfiledStep) -> tuple[Bound, list[str]]:
    """Returns the bound of a step and the sentences of its evidence."""
    found = bound_times(step)
    ordered = sorted(found, key=lambda name: -found[name])
    first = ordered[0]
    shares = [f"{name} {percent(step.share(found[name]))}" for name in ordered if step.share(found[name]) >= 0.01]
    evidence = [f"Of a step of {format_milliseconds(step.ms)}: {', '.join(shares)}."] if shares else []
    if step.share(found[first]) < _MIN_SHARE:
        return "unknown", [*evidence, "No measured part takes a fifth of the step."]
    return first, [*evidence, *_bound_details(step, first, found[first]), *_limit_sentences(step)]


def _bound_details(step: ProfiledStep, bound: Bound, ms: float) -> list[str]:
    if bound == "overhead":
        calls = sum(one.calls for one in step.operators(lambda one: True))
        return [f"The step starts {calls:.0f} operations, each {1e3 * step.launch_ms:.1f} us to start on this machine."]
    if bound == "input":
        return [f"Waiting for the next batch and making it take {format_milliseconds(ms)}."]
    if bound == "waiting":
        others = f"The first rank waits for the others during {format_milliseconds(ms)}."
        return [others, *filter(None, [describe_slowest_rank(step)])]
    if bound == "communication":
        return [f"During {format_milliseconds(ms)} the first rank only sends and receives."]
    if bound in ("arithmetic", "memory bandwidth"):
        ones = [
            one
            for one in step.profile.operators
            if one.phase in COMPUTING_PHASES and _operator_bound(step, one) == bound
        ]
        most = max(ones, key=step.cost_ms)
        place = most.module or most.where or "the step"
        return [f"The largest part is {most.name} of {place}: {percent(step.share(step.cost_ms(most)))} of the step."]
    return []


def _limit_sentences(step: ProfiledStep) -> list[str]:
    if step.profile.limits.busy:
        return [
            "This machine's limits were measured while other programs used it, so no advice uses them: "
            "measure them again with hotloop devices --refresh when the machine is quiet."
        ]
    least = limit_ms(step)
    if not least or least > step.ms:
        return []
    return [
        f"At this machine's measured limits, the step's arithmetic and memory traffic take {format_milliseconds(least)}: "
        f"{percent(step.share(least))} of the step's time."
    ]


def limit_ms(step: ProfiledStep) -> float | None:
    """Returns the least ms of the operators with known work at the machine's limits; None if there are none."""
    if step.profile.limit_ms is not None:
        return step.profile.limit_ms
    least = sum(operator_least_ms(one, step.profile) for one in step.operators(lambda one: True))
    return least or None


_SHARED_PHASES: tuple[Phase, ...] = ("data", "batch", "copy", "forward", "loss", "backward")
"""Phases in which each rank computes its rows of the batch."""
_RANK_PHASES: tuple[Phase, ...] = ("waiting", "communication")
_ROW_PARALLEL = ("data", "sharded", "towers", "local")
_DEFAULT_SYNC_EVERY = 16  # steps between two averages of the weights, if the plan has no number


def rank_communication(step: ProfiledStep) -> Iterator[Remedy]:
    if len(step.profile.ranks) < 2:
        return
    parallel = _axis_value(step, "parallel")
    if parallel == "stages":
        yield from _idle_stages(step)
        return
    if parallel in _ROW_PARALLEL:
        yield from _needless_ranks(step)
        yield from _gradient_sums(step, parallel)
    yield from _uneven_ranks(step)


def describe_slowest_rank(step: ProfiledStep) -> str:
    """Returns a sentence on the phase in which the slowest rank takes longer than any other; else empty."""
    found = _slowest_rank(step)
    if found is None:
        return ""
    slowest, phase, ms = found
    return f"Rank {slowest} spends {format_milliseconds(ms)} more in {phase} than the quickest of the others."


def _gradient_sums(step: ProfiledStep, parallel: str) -> Iterator[Remedy]:
    """All gradients are summed in each step; local SGD averages weights instead."""
    sent = step.phase("communication")
    axes: dict[str, str | int | bool] = {} if parallel == "local" else {"parallel": "local"}
    then = (
        "" if parallel == "local" else ", or averages of weights every few steps in place of gradients: another result"
    )
    yield Remedy(
        cause="communication: at each step the ranks send as many numbers as the model has parameters",
        where="",
        remedy=f"a larger batch, which needs no more communication (it changes the training){then}",
        gain=step.share((1 - 1 / _DEFAULT_SYNC_EVERY) * sent),
        evidence=f"{format_milliseconds(sent)} of each step of {format_milliseconds(step.ms)} are communication that "
        "overlaps with no computation",
        axes=axes,
    )


def _uneven_ranks(step: ProfiledStep) -> Iterator[Remedy]:
    ranks, slowest = step.profile.ranks, step.profile.slowest
    if slowest is None:
        return
    waits = [one.phases.get("waiting", 0.0) for one in ranks]
    lost = max(waits) - waits[slowest]
    why = describe_slowest_rank(step)
    yield Remedy(
        cause=f"waiting: rank {slowest} is slower than the others",
        where="",
        remedy="check what takes longer on this rank, and which other programs run on its cores or its machine",
        gain=step.share(lost),
        evidence=f"others wait {format_milliseconds(lost)} of each step of {format_milliseconds(step.ms)} for it"
        + f". {why}".rstrip(". "),
    )


def _needless_ranks(step: ProfiledStep) -> Iterator[Remedy]:
    ranks = step.profile.ranks
    count = len(ranks)
    computed = max(sum(one.phases.get(name, 0.0) for name in _SHARED_PHASES) for one in ranks)
    spent = min(sum(one.phases.get(name, 0.0) for name in _RANK_PHASES) for one in ranks)
    alone = step.ms - spent + (count - 1) * computed
    yield Remedy(
        cause=f"{count} ranks, whose communication takes longer than the computation of each",
        where="",
        remedy="one process for the whole batch",
        gain=step.share(step.ms - alone),
        evidence=f"it would take about {format_milliseconds(alone)}, even if its operations get no more threads: {count} times the "
        f"{format_milliseconds(computed)} that a rank computes of its part, and nothing to send",
        axes={"parallel": "none", "ranks": 1},
    )


def _idle_stages(step: ProfiledStep) -> Iterator[Remedy]:
    """Pipeline stages wait for each other."""
    pieces = int(_axis_value(step, "microbatches") or 4 * len(step.profile.ranks))
    idle = min(one.phases.get("waiting", 0.0) for one in step.profile.ranks)
    yield Remedy(
        cause="waiting: at the beginning and the end of each step some stages have no microbatch",
        where="",
        remedy="more microbatches, as long as each is large enough to keep its rank busy, or other cuts (split)",
        gain=step.share(idle / 2),
        evidence=f"each rank waits {format_milliseconds(idle)} or more of each step of {format_milliseconds(step.ms)}, for {pieces} microbatches",
        axes={"microbatches": 2 * pieces},
    )


def _slowest_rank(step: ProfiledStep) -> tuple[int, Phase, float] | None:
    """Returns the slowest rank, the phase of its largest excess over the quickest other rank, and that excess (ms)."""
    ranks, slowest = step.profile.ranks, step.profile.slowest
    if slowest is None:
        return None
    others = [one for rank, one in enumerate(ranks) if rank != slowest]

    def more(phase: Phase) -> float:
        return ranks[slowest].phases.get(phase, 0.0) - min(one.phases.get(phase, 0.0) for one in others)

    phase = max((name for name in ranks[slowest].phases if name not in _RANK_PHASES), key=more, default=None)
    return None if phase is None or more(phase) <= 0 else (slowest, phase, more(phase))


def _axis_value(step: ProfiledStep, axis: str) -> str:
    """Returns the plan's value of an axis; empty for the default."""
    set_ones = dict(part.split("=", 1) for part in step.profile.plan.split() if "=" in part)
    return set_ones.get(axis, "")


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


_MIN_CALL_SHARE = 0.2  # least share of calls in the step; larger than the error of the measurement
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
    if step.share(calling) < _MIN_CALL_SHARE or calling < samples / _ENOUGH_SAMPLES * (step.ms - calling):
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
        evidence=f"{step.part(calling)} are spent on calling operations and on work for "
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
