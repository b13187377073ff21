"""Habits: what the loop does again and again for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.diagnosing.step import COMPUTING, COUNTS, Step, percent
from hotloop.profiles import Habit, Remedy

_SAID = {
    "kept graph": (
        "a growing list of losses with graphs: what led to each loss stays in memory",
        "keep the number: loss.item() or loss.detach()",
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
        "reuse the outputs of the training's forward, and validate once in an epoch or every few hundred steps",
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
    if habit.what == "autograd in evaluation":  # costs memory first, and its time lies mostly apart
        return 0.0
    if habit.what == "hook":  # at each operation, beside what it does
        return sum(one.calls * step.between_ms(one.phase) for one in step.operators(lambda one: one.phase in COMPUTING))
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
