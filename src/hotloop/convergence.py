"""Does a plan's training end where the baseline's does? Several seeds, and a test of equivalence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hotloop.errors import PlanError
from hotloop.evaluation import evaluate
from hotloop.lowering import lower
from hotloop.plan import Plan
from hotloop.rng import preserved
from hotloop.task import Task
from hotloop.verdicts import Convergence

_LEAST_MARGIN = 0.01
"""Of the baseline's figure."""

_LEVEL, _LEAST_SEEDS = 0.05, 3


def converges(
    task: Task, plan: Plan, seeds: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Convergence:
    """Trains a Task to its end, under the baseline and under a plan, once with each of so many seeds from its own on.

    Raises:
        PlanError: fewer than three seeds, which have no spread to speak of.
    """
    check_seeds(seeds)
    numbers = [task.seed + place for place in range(seeds)]
    plans = (Plan(device=plan.device, workers=plan.workers), plan)
    found: tuple[list[float], list[float]] = ([], [])
    for number in numbers:
        for one, figures in zip(plans, found, strict=True):
            figures.append(_final(replace(task, seed=number), one))
            progress(len(found[0]) + len(found[1]), 2 * seeds)
    what = "train_loss" if task.roles.validation is None else "validation_loss"
    return compared(*found, what=what, epochs=task.epochs, seeds=numbers)


def check_seeds(seeds: int) -> None:
    """Raises PlanError for so few that they have no spread to speak of."""
    if seeds < _LEAST_SEEDS:
        expected = f"{_LEAST_SEEDS} or more"
        raise PlanError(f"{seeds} seeds for a test of convergence", expected=expected, fix=f"use {_LEAST_SEEDS}")


def compared(
    baseline: Sequence[float], plan: Sequence[float], *, what: str, epochs: int, seeds: Sequence[int]
) -> Convergence:
    """The test on figures that belong together seed by seed; one that isn't finite is never equivalent."""
    from scipy import stats  # takes half a second and 50 MB, which no training shall pay for

    ours, theirs = np.asarray(plan), np.asarray(baseline)
    apart = ours - theirs
    mean, error = float(apart.mean()), float(stats.sem(apart))
    reach = float(stats.t.ppf(1 - _LEVEL, len(apart) - 1)) * error
    margin = max(float(theirs.std(ddof=1)), _LEAST_MARGIN * abs(float(theirs.mean())))
    within = bool(mean - reach > -margin and mean + reach < margin)
    return Convergence(
        what=what,
        epochs=epochs,
        seeds=list(seeds),
        baseline=list(baseline),
        plan=list(plan),
        difference=mean,
        low=mean - reach,
        high=mean + reach,
        margin=margin,
        equivalent=within and math.isfinite(mean),
    )


def _final(task: Task, plan: Plan) -> float:
    """The loss that a training ends with: on the validation data, or else over its last epoch."""
    validation = task.roles.validation
    with preserved():
        program = lower(task, plan)
        program.seed_all()
        try:
            loss = math.nan
            for _ in range(task.epochs):
                while not program.advance(1000).ended:
                    pass
                sums = program.read_sums()
                loss = sums["loss"] / (sums["weight"] or math.nan)
                if validation is not None:
                    loss = evaluate(program, validation).values["loss"]
                program.end_epoch(loss)
            return loss
        finally:
            program.close()
