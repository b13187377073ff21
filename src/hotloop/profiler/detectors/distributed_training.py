"""Costs of distributed steps: communication, waiting for the slowest rank, and ranks without benefit."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.core.format import format_milliseconds
from hotloop.core.records.profile import Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.step import ProfiledStep

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
