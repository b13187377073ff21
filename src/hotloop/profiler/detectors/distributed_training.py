"""Steps that ranks share: what they send each other, waiting for the slowest, and whether sharing pays at all."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.core.format import milliseconds
from hotloop.core.records.profile import Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.step import Step

_SHARED: tuple[Phase, ...] = ("data", "batch", "copy", "forward", "loss", "backward")
"""Phases of which each rank has its part, where it computes its rows of the batch."""
_SPENT: tuple[Phase, ...] = ("waiting", "communication")
_BY_ROWS = ("data", "sharded", "towers", "local")
_MEETINGS = 16
"""Steps between two averages, where the plan doesn't say."""


def shared(step: Step) -> Iterator[Remedy]:
    """What ranks could do about the time that they spend on each other."""
    if len(step.profile.ranks) < 2:
        return
    parallel = _axis(step, "parallel")
    if parallel == "stages":
        yield from _relayed(step)
        return
    if parallel in _BY_ROWS:
        yield from _needless(step)
        yield from _sending(step, parallel)
    yield from _uneven(step)


def behind(step: Step) -> str:
    """A sentence on what the slowest rank does longer than any other; empty where there is no such thing."""
    found = _most_behind(step)
    if found is None:
        return ""
    slowest, phase, ms = found
    return f"Rank {slowest} spends {milliseconds(ms)} more in {phase} than the quickest of the others."


def _sending(step: Step, parallel: str) -> Iterator[Remedy]:
    """Sums of all gradients at each step; with a plan that averages weights now and then there are none."""
    sent = step.phase("communication")
    axes: dict[str, str | int | bool] = {} if parallel == "local" else {"parallel": "local"}
    then = "" if parallel == "local" else ", or average weights now and then in place of gradients: another result"
    yield Remedy(
        cause="communication: the ranks send each other as much at each step as the model has parameters",
        where="",
        remedy=f"a larger batch, for which no more is sent (it changes the training){then}",
        gain=step.share((1 - 1 / _MEETINGS) * sent),
        evidence=f"{milliseconds(sent)} of each step of {milliseconds(step.ms)} go by in communication, with nothing else to do",
        axes=axes,
    )


def _uneven(step: Step) -> Iterator[Remedy]:
    """A rank that the others wait for."""
    ranks, slowest = step.profile.ranks, step.profile.slowest
    if slowest is None:
        return
    waits = [one.phases.get("waiting", 0.0) for one in ranks]
    lost = max(waits) - waits[slowest]
    why = behind(step)
    yield Remedy(
        cause=f"waiting: rank {slowest} is slower than the others",
        where="",
        remedy="look at what it does longer, and what else runs on its cores or its machine",
        gain=step.share(lost),
        evidence=f"others wait {milliseconds(lost)} of each step of {milliseconds(step.ms)} for it"
        + f". {why}".rstrip(". "),
    )


def _needless(step: Step) -> Iterator[Remedy]:
    """Ranks that spend more on each other than they spare."""
    ranks = step.profile.ranks
    count = len(ranks)
    computed = max(sum(one.phases.get(name, 0.0) for name in _SHARED) for one in ranks)
    spent = min(sum(one.phases.get(name, 0.0) for name in _SPENT) for one in ranks)
    alone = step.ms - spent + (count - 1) * computed
    yield Remedy(
        cause=f"{count} ranks, which spend more on each other than each computes",
        where="",
        remedy="one process for the whole batch",
        gain=step.share(step.ms - alone),
        evidence=f"it would take about {milliseconds(alone)}, even if its operations get no more threads: {count} times the "
        f"{milliseconds(computed)} that a rank computes of its part, and nothing to send",
        axes={"parallel": "none", "ranks": 1},
    )


def _relayed(step: Step) -> Iterator[Remedy]:
    """Stages that have nothing to do until others are done."""
    pieces = int(_axis(step, "microbatches") or 4 * len(step.profile.ranks))
    idle = min(one.phases.get("waiting", 0.0) for one in step.profile.ranks)
    yield Remedy(
        cause="waiting: at the beginning and the end of each step some stages have no microbatch",
        where="",
        remedy="more microbatches, as long as each is large enough to keep its rank busy, or other cuts (split)",
        gain=step.share(idle / 2),
        evidence=f"each rank waits {milliseconds(idle)} or more of each step of {milliseconds(step.ms)}, for {pieces} microbatches",
        axes={"microbatches": 2 * pieces},
    )


def _most_behind(step: Step) -> tuple[int, Phase, float] | None:
    """The slowest rank, the phase in which it takes longest beyond the quickest of the others, and how much; ms."""
    ranks, slowest = step.profile.ranks, step.profile.slowest
    if slowest is None:
        return None
    others = [one for rank, one in enumerate(ranks) if rank != slowest]

    def more(phase: Phase) -> float:
        return ranks[slowest].phases.get(phase, 0.0) - min(one.phases.get(phase, 0.0) for one in others)

    phase = max((name for name in ranks[slowest].phases if name not in _SPENT), key=more, default=None)
    return None if phase is None or more(phase) <= 0 else (slowest, phase, more(phase))


def _axis(step: Step, axis: str) -> str:
    """What the plan has for an axis; empty if it is the baseline's."""
    set_ones = dict(part.split("=", 1) for part in step.profile.plan.split() if "=" in part)
    return set_ones.get(axis, "")
