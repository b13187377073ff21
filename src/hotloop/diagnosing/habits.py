"""Habits: what the loop does again and again for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.diagnosing.step import COMPUTING, COUNTS, PLAIN, Step, grouped, heaviest, percent
from hotloop.profiles import Habit, Remedy

_SAID = {
    "kept graph": (
        "a growing list of losses with graphs: what led to each loss stays in memory",
        "keep the number: loss.item() or loss.detach()",
    ),
    "carried graph": (
        "a graph that is carried over steps: each backward goes through those of earlier steps again",
        "detach what one step hands to the next: state.detach(), loss.detach()",
    ),
    "retained graph": (
        "an unneeded retain_graph: the graph is kept for a backward that never comes",
        "leave out retain_graph=True",
    ),
    "wasted forward": (
        "double evaluation: a forward whose result no backward uses",
        "use the outputs and the loss that the step has already; without need for gradients: torch.no_grad()",
    ),
    "evaluation": (
        "evaluation at each step: a forward without gradients beside the training's own",
        "if it only tells how good the network is: reuse the outputs of the training's forward, and validate once in an epoch "
        "or every few hundred steps",
    ),
    "unused graph": (
        "a graph is built for a forward that no backward comes back to",
        "call it within torch.no_grad()",
    ),
    "autograd in evaluation": (
        "evaluation builds graphs that nobody uses",
        "evaluate within torch.no_grad() or torch.inference_mode()",
    ),
    "hook": (
        "torch's anomaly detection is on",
        "leave out torch.autograd.set_detect_anomaly(True) when all is well",
    ),
}

_OFTEN = 0.5
"""Times in a step from which on it's a habit of the step."""


def habitual(step: Step) -> Iterator[Remedy]:
    """What was seen to happen at each step, or nearly."""
    for habit in step.profile.habits:
        if habit.per_step < _OFTEN and habit.what != "autograd in evaluation":
            continue
        cause, remedy = _SAID[habit.what]
        gain = step.share(_won(step, habit))
        yield Remedy(
            cause=cause,
            where=habit.where,
            remedy=remedy,
            gain=gain,
            evidence=_evidence(step, habit),
            note=gain < COUNTS,
        )


def _won(step: Step, habit: Habit) -> float:
    """Milliseconds of a step that go with the habit, at most."""
    if habit.what in ("autograd in evaluation", "unused graph"):  # the forward stays; its graph costs memory first
        return 0.0
    if habit.what == "hook":  # at each operation of a graph, beside what it does
        ones = step.operators(lambda one: one.phase in COMPUTING and one.phase != "update")
        return sum(one.calls * step.between_ms(one.phase) for one in ones)
    return habit.ms or 0.0


def _evidence(step: Step, habit: Habit) -> str:
    often = f"{habit.per_step:.0f} times in a step" if habit.per_step >= 1.5 else "at each step"
    parts = [f"seen {often if habit.per_step >= _OFTEN else 'now and then'}"]
    if _won(step, habit):
        parts.append(f"{_won(step, habit):.2f} ms, {percent(step.share(_won(step, habit)))} of it")
    else:
        parts.append("it takes next to no time here")
    if habit.bytes and habit.bytes > 0.05 * 2**20:
        parts.append(f"memory grows by {habit.bytes / 2**20:.1f} MiB each time")
    return "; ".join(parts)


def in_vain(step: Step) -> Iterator[Remedy]:
    """Functions over tensors whose operations no backward uses, while it uses others of the same lines.

    Of networks that are modules the habits tell: a teacher may well go through the same lines as the one that learns.
    """
    if any(habit.what in ("wasted forward", "unused graph") for habit in step.profile.habits):
        return
    ones = step.operators(lambda one: one.used is not None and bool(one.where) and one.module in PLAIN)
    same = grouped(ones, lambda one: (one.where, one.name, tuple(one.shapes))).values()
    twice = [one for calls in same if {one.used for one in calls} == {True, False} for one in calls]
    unused = [one for one in twice if not one.used and one.calls >= _OFTEN]
    gain = step.share(sum(step.cost(one) for one in unused))
    if gain < COUNTS:
        return
    yield Remedy(
        cause="double evaluation: a function is called once more, and no backward uses what it gives",
        where=heaviest(unused, step),
        remedy="use what the step has computed already; without need for gradients: torch.no_grad()",
        gain=gain,
        evidence=f"{sum(one.calls for one in unused):.0f} operations at lines that the backward goes through for others, "
        f"{percent(gain)} of the step of {step.ms:.2f} ms",
    )
