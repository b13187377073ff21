"""Habits: what the loop does again and again for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.diagnosing.step import COUNTS, OFTEN, PLAIN, Step, grouped, heaviest, percent
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
    "created graph": (
        "an unneeded create_graph: the backward builds a graph of itself that nobody goes through",
        "leave out create_graph=True",
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
        "call it within torch.no_grad(); if it only tells how good the network is, every few hundred steps",
    ),
    "autograd in evaluation": (
        "evaluation builds graphs that nobody uses",
        "evaluate within torch.no_grad() or torch.inference_mode()",
    ),
    "repeated forward": (
        "a repeated forward: the network is asked twice about the same inputs, and gives the same",
        "keep the outputs of the first: out = net(x), and use them in all terms of the loss",
    ),
    "recomputed forward": (
        "forwards are computed again within the backward, as checkpointing of activations asks for",
        "leave out torch.utils.checkpoint where memory allows, or checkpoint fewer and larger parts",
    ),
    "shared graph": (
        "two backwards go through one graph: what their losses share is gone through by each",
        "one backward of the sum, (a + b).backward(), which adds up the same gradients",
    ),
    "unused gradients": (
        "gradients that nobody uses: no optimizer updates these parameters",
        "requires_grad_(False) for what isn't trained, before the loop; or call it within torch.no_grad()",
    ),
    "cleared gradients": (
        "gradients that are cleared before anybody uses them: a loss goes back through a network that isn't updated by it, as a "
        "discriminator's through the generator",
        "detach what comes from that network: net(fake.detach()); then retain_graph=True isn't needed either",
    ),
    "unread gradients": (
        "gradients of weights that are cleared before any optimizer reads them: a loss goes back through a network that it doesn't "
        "train, as a generator's through the discriminator",
        "requires_grad_(False) for that network's parameters around this loss and its backward, or "
        "loss.backward(inputs=list(of the trained parameters))",
    ),
    "argument validation": (
        "argument validation of torch.distributions: each distribution and each log_prob checks its numbers",
        "validate_args=False for the distributions, or torch.distributions.Distribution.set_default_validate_args(False) "
        "once at the start, when all is well",
    ),
    "input gradients": (
        "gradients of the inputs are computed, as requires_grad on them asks for",
        "leave out requires_grad if nobody looks at their .grad",
    ),
    "profiler": (
        "a profiler of the script's own is on",
        "profile a few steps alone, with torch.profiler.schedule, and leave it out when all is well",
    ),
    "garbage collection": (
        "Python's garbage collection at each step",
        "leave out gc.collect() in the loop; gc.freeze() after setting up spares collections what is there to stay",
    ),
    "hook": (
        "torch's anomaly detection is on",
        "leave out torch.autograd.set_detect_anomaly(True) when all is well",
    ),
}

_SAID_OF_LINES = ("checkpoint",)
"""What is told with all that goes on in the function that does it."""

_ONE_SWITCH = ("argument validation",)
"""Habits that one call removes at all lines."""

_ALSO_SELDOM = ("autograd in evaluation", "evaluation")
"""What is told though it's in less than half of the steps: an evaluation then comes from times of all of them."""

_MAY_BE_MEANT = ("input gradients",)
"""What may well be a part of the method, and stays a note."""

_IF_IT_COUNTS = ("garbage collection",)
"""What any loop has a little of."""

_CHECKING = frozenset({"aten::isnan", "aten::any", "aten::_is_any_true", "aten::is_nonzero", "aten::item"})
"""By what anomaly detection looks for NaN, with an operator or two less in a newer torch."""


def habitual(step: Step) -> Iterator[Remedy]:
    """What was seen to happen at each step, or nearly."""
    for habit in _with_one_remedy(step.profile.habits):
        if habit.what in _SAID_OF_LINES or (habit.per_step < OFTEN and habit.what not in _ALSO_SELDOM):
            continue
        cause, remedy = _SAID[habit.what]
        gain = step.share(_won(step, habit))
        if (habit.what in _IF_IT_COUNTS or (habit.what == "evaluation" and habit.per_step < OFTEN)) and gain < COUNTS:
            continue
        yield Remedy(
            cause=cause,
            where=(habit.what == "recomputed forward" and _again(step)) or habit.where,
            remedy=remedy,
            gain=gain,
            evidence=_evidence(step, habit),
            note=gain < COUNTS or habit.what in _MAY_BE_MEANT,
        )


def _with_one_remedy(habits: Sequence[Habit]) -> Iterator[Habit]:
    """Sums the habits of all lines where one switch removes them together; the line is that of the largest."""
    for what, same in grouped(habits, lambda one: one.what).items():
        if what not in _ONE_SWITCH or len(same) == 1:
            yield from same
            continue
        largest = max(same, key=lambda one: one.ms or 0.0)
        yield largest.model_copy(
            update={"per_step": sum(one.per_step for one in same), "ms": sum(one.ms or 0.0 for one in same)}
        )


def _again(step: Step) -> str:
    """The line of the forwards that run again: most of what a backward does as a forward did, as far as operators tell."""
    forward = {(one.module, one.name, *one.shapes) for one in step.operators(lambda one: one.phase == "forward")}
    backward = step.operators(lambda one: one.phase == "backward" and one.module not in PLAIN)
    return heaviest([one for one in backward if (one.module, one.name, *one.shapes) in forward and one.where], step)


def _won(step: Step, habit: Habit) -> float:
    """Milliseconds of a step that go with the habit, at most."""
    if habit.what in ("autograd in evaluation", "unused graph"):  # the forward stays; its graph costs memory first
        return 0.0
    if habit.what == "hook":  # it remembers who made each node, and looks at what each gives
        checks = step.operators(lambda one: one.phase == "backward" and one.name in _CHECKING)
        return (habit.ms or 0.0) + sum(step.cost(one) for one in checks)
    if habit.what == "profiler":
        each_ms = (habit.call_us or 0.0) / 1e3 - step.launch_ms
        return max(0.0, (habit.calls or 0.0) * each_ms)
    if habit.what == "evaluation" and habit == _longest(step, "evaluation"):
        return (habit.ms or 0.0) + step.evaluating_ms
    return habit.ms or 0.0


def _longest(step: Step, what: str) -> Habit:
    """Of several evaluations nobody knows whose batches a loader gave."""
    return max((one for one in step.profile.habits if one.what == what), key=lambda one: one.ms or 0.0)


def _evidence(step: Step, habit: Habit) -> str:
    often = f"{habit.per_step:.0f} times in a step" if habit.per_step >= 1.5 else "at each step"
    parts = [f"seen {often if habit.per_step >= OFTEN else 'now and then'}"]
    if _won(step, habit):
        parts.append(f"{_won(step, habit):.2f} ms, {percent(step.share(_won(step, habit)))} of it")
    elif habit.what == "unused graph" and step.share(habit.ms or 0.0) >= COUNTS:
        parts.append(f"the forward takes {habit.ms:.2f} ms, {percent(step.share(habit.ms or 0.0))} of it")
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
    unused = [one for one in twice if not one.used and one.calls >= OFTEN]
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
