"""Finds the bound of a step, the resource that takes most of its time; waits of ranks; work between some steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.core.format import format_milliseconds
from hotloop.core.records.profile import OperatorTime, Remedy
from hotloop.core.records.profile_terms import Bound, Phase
from hotloop.profiler.detectors.step import COMPUTING_PHASES, ProfiledStep, is_product, operator_least_ms, percent
from hotloop.profiler.roofline import precision_in

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
    if step.profile.engine == "arrays":
        return _bound_of_arrays(step, found)
    first = ordered[0]
    shares = [f"{name} {percent(step.share(found[name]))}" for name in ordered if step.share(found[name]) >= 0.01]
    evidence = [f"Of a step of {format_milliseconds(step.ms)}: {', '.join(shares)}."] if shares else []
    if step.share(found[first]) < _MIN_SHARE:
        return "unknown", [*evidence, "No measured part takes a fifth of the step."]
    return first, [*evidence, *_bound_details(step, first, found[first]), *_limit_sentences(step)]


def _bound_of_arrays(step: ProfiledStep, found: dict[Bound, float]) -> tuple[Bound, list[str]]:
    """Only layers are timed: another bound must take more time than all layers, else the bound is unknown."""
    layers = step.phase(*COMPUTING_PHASES)
    parts = {"array operations": layers, **{str(name): ms for name, ms in found.items() if step.share(ms) >= 0.001}}
    shares = [f"{name} {percent(step.share(parts[name]))}" for name in sorted(parts, key=lambda name: -parts[name])]
    evidence = [f"Of a step of {format_milliseconds(step.ms)}: {', '.join(shares)}."]
    first = max(found, key=lambda name: found[name])
    if found[first] > layers:
        return first, [*evidence, *(_bound_details(step, first, found[first]) if first == "input" else [])]
    own = {one.name: (one.own_forward_ms or 0.0) + (one.own_backward_ms or 0.0) for one in step.profile.modules}
    if own:
        most = max(own, key=lambda name: own[name])
        name = most or "functions of the model's own forward"
        evidence.append(f"The largest part is {name}: {percent(step.share(own[most]))} of the step.")
    unseen = "Whether layers are bound by arithmetic, memory or calls isn't measured."
    return "unknown", [*evidence, unseen]


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
