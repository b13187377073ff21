"""The learning-rate range test: the rate grows with each step, and a run with the recommended rate confirms it.

L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from hotloop.core.records.study import LearningRateRange, Value
from hotloop.errors import StudyError
from hotloop.hyperparameters.finders import load_finder_task, rules_plan
from hotloop.hyperparameters.space import TASK_FIELDS, as_text
from hotloop.hyperparameters.trial_processes import TaskSource
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.task import Task

LOWEST, HIGHEST = 1e-6, 10.0

STEPS = 120
"""Steps of the test, and of the confirming run."""

_SMOOTHING = 0.9
"""Weight of the earlier losses in the smoothed loss."""

_DIVERGED = 4.0
"""The test ends when the smoothed loss is this many times the smallest one."""

_FACTORS = (1.0, 1 / 3, 3.0, 0.1, 10.0)
"""Rates of the confirming runs, relative to that of the steepest descent; the first confirmed rate is recommended."""

_CONFIRMED = 0.5
"""Share of the test's fall of the loss that a confirming run must reach."""

_WINDOW = 0.1
"""Share of the test's steps on each side of a rate over which the slope of the loss is fitted."""

_NAMES = ("lr", "learning_rate")


def measure_learning_rates(
    source: TaskSource, values: Mapping[str, Value], axes: Mapping[str, Any]
) -> LearningRateRange:
    """Returns the range test of a Task; the work of a trial process."""
    task, arguments = load_finder_task(source, values)
    command = _command(source.reference, values, arguments) if source.make_task is None else ""
    return range_test(task, rules_plan(task, axes), command)


def _command(reference: str, values: Mapping[str, Value], arguments: Sequence[str]) -> str:
    """Returns the line that trains with a rate, up to the rate; empty without an argument for the rate."""
    name = next((name for name in _NAMES if name in arguments), None)
    if name is None:
        return ""
    fields = [f"--{key.replace('_', '-')} {as_text(value)}" for key, value in values.items() if key in TASK_FIELDS]
    others = [f"-p {shlex.quote(f'{key}={as_text(value)}')}" for key, value in values.items() if key in arguments]
    return " ".join(["hotloop train", shlex.quote(reference), *others, *fields, "-p", f"{name}="])


def range_test(task: Task, plan: Plan, command: str = "", steps: int = STEPS) -> LearningRateRange:
    """Trains new models: one with growing rates, then with the recommended rate.

    Raises:
        StudyError: the optimizer has no learning rate.
    """
    rates = [LOWEST * (HIGHEST / LOWEST) ** (step / (steps - 1)) for step in range(steps)]
    losses = smooth(_losses(task, plan, rates, stop=_has_diverged))
    steepest, rate, first, last = recommend(rates, losses), None, None, None
    for factor in () if steepest is None else _FACTORS:
        assert steepest is not None
        first, last = _ends(_losses(task, plan, [factor * steepest] * steps), steps)
        if last is not None and last < losses[0] - _CONFIRMED * (losses[0] - min(losses)):
            rate = factor * steepest
            break
    return LearningRateRange(
        name=task.name,
        rates=rates[: len(losses)],
        losses=losses,
        recommended=rate,
        steps=steps,
        first_loss=first,
        last_loss=last,
        command=f"{command}{rate:.3g}" if command and rate is not None else "",
    )


def _losses(task: Task, plan: Plan, rates: Sequence[float], stop: Any = lambda losses: False) -> list[float]:
    """Returns the loss of each step under these rates, to the first that isn't finite or to a stop."""

    def schedule(optimizer: Any) -> LambdaLR:
        initial = [group.get("lr") for group in optimizer.param_groups]
        if not all(isinstance(rate, float | int) and rate > 0 for rate in initial):
            raise StudyError("the optimizer has no learning rate above 0", expected="lr in each parameter group")
        return LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)] / float(initial[0]))

    losses: list[float] = []
    tested = replace(task, schedule=schedule, schedule_every="step", epochs=len(rates), callbacks=())
    with closing(lower(tested, plan)) as program:
        before = (0.0, 0.0)
        while len(losses) < len(rates) and not stop(losses):
            outcome = program.advance(1)
            sums = program.read_sums()
            loss, weight = sums["loss"] - before[0], sums["weight"] - before[1]
            before = sums["loss"], sums["weight"]
            if outcome.steps and weight:
                losses.append(loss / weight)
                if not math.isfinite(losses[-1]):
                    return losses[:-1]
            if outcome.ended:
                program.end_epoch(losses[-1])
                before = (0.0, 0.0)
    return losses


def _has_diverged(losses: Sequence[float]) -> bool:
    smoothed = smooth(losses)
    return len(smoothed) > 1 and smoothed[-1] > _DIVERGED * max(min(smoothed), 0.0) and smoothed[-1] > smoothed[0]


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns the exponential mean, corrected for its start."""
    smoothed, mean = [], 0.0
    for step, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smoothed.append(mean / (1 - _SMOOTHING**step))
    return smoothed


def recommend(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Returns the rate of the steepest descent of the loss before its minimum; None if the loss doesn't fall."""
    if not smoothed:
        return None
    half = max(1, round(_WINDOW * len(smoothed)))
    logs = [math.log(rate) for rate in rates]
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    slopes = {
        step: statistics.linear_regression(
            logs[step - half : step + half + 1], smoothed[step - half : step + half + 1]
        ).slope
        for step in range(half, min(lowest, len(smoothed) - half - 1) + 1)
    }
    if not slopes or min(slopes.values()) >= 0:
        return None
    return rates[min(slopes, key=slopes.__getitem__)]


def _ends(losses: Sequence[float], steps: int) -> tuple[float, float | None]:
    """Returns the means over the first and the last tenth; None for a run that didn't reach its end."""
    tenth = max(1, steps // 10)
    first = sum(losses[:tenth]) / max(1, len(losses[:tenth]))
    return first, sum(losses[-tenth:]) / tenth if len(losses) == steps else None
