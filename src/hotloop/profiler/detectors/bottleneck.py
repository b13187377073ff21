"""Finds the bound of a step: the resource that takes most of its time."""

from __future__ import annotations

from hotloop.core.format import format_milliseconds
from hotloop.core.records.profile import OperatorTime
from hotloop.core.records.profile_terms import Bound
from hotloop.profiler.costs.roofline import precision_in
from hotloop.profiler.detectors.distributed_training import describe_slowest_rank
from hotloop.profiler.detectors.step import COMPUTING_PHASES, ProfiledStep, is_product, operator_least_ms, percent

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
