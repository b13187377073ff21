"""Does a plan's training end where the baseline's does? Several seeds, and a test of equivalence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hotloop.core.processes.signals import end_reason
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import Convergence
from hotloop.data.sources import Source
from hotloop.errors import HotloopError, PlanError
from hotloop.lowering.build import lower
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.failures.explanation import explain_error
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task

_MIN_MARGIN = 0.01
"""Of the baseline's figure."""

_LEVEL, _LEAST_SEEDS = 0.05, 3


def check_convergence(
    task: Task, plan: Plan, seeds: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Convergence:
    """Trains a Task to its end, under the baseline and under a plan, once with each of so many seeds from its own on.

    Where a training fails, or at Ctrl-C or SIGTERM, what was trained until then is the result, and says so.

    Raises:
        PlanError: fewer than three seeds, which have no spread to speak of.
    """
    check_seeds(seeds)
    numbers = [task.seed + place for place in range(seeds)]
    plans = {"baseline": Plan(device=plan.device, workers=plan.workers), "plan": plan}
    found: dict[str, list[float]] = {name: [] for name in plans}
    todo = [(number, name) for number in numbers for name in plans]
    done, ended = 0, dict[str, str]()
    try:
        for done, (number, name) in enumerate(todo):
            found[name].append(_final_loss(replace(task, seed=number), plans[name]))
            progress(done + 1, len(todo))
    except (HotloopError, KeyboardInterrupt) as error:
        number, name = todo[done]
        ended = end_reason(f"the training of the {name} with seed {number}", error)
    what = "train_loss" if task.roles.validation is None else "validation_loss"
    both, seen = (found["baseline"], found["plan"]), numbers[: len(found["baseline"])]
    return compare_losses(*both, what=what, epochs=task.epochs, seeds=seen, ended=ended)


def check_seeds(seeds: int) -> None:
    """Raises PlanError for so few that they have no spread to speak of."""
    if seeds < _LEAST_SEEDS:
        expected = f"{_LEAST_SEEDS} or more"
        raise PlanError(f"{seeds} seeds for a test of convergence", expected=expected, fix=f"use {_LEAST_SEEDS}")


def compare_losses(
    baseline: Sequence[float],
    plan: Sequence[float],
    *,
    what: str,
    epochs: int,
    seeds: Sequence[int],
    ended: Mapping[str, Any] | None = None,
) -> Convergence:
    """The test on figures that belong together seed by seed; one that isn't finite is never equivalent.

    Args:
        ended: `ended_by` and `ended` of the record. Seeds trained both ways before a stop are tested like others; a
            training that failed has no end that could be alike.
    """
    pairs = [(theirs, ours) for theirs, ours in zip(baseline, plan, strict=False)]  # a stop may come between the two
    able = len(pairs) >= _LEAST_SEEDS and (ended or {}).get("ended_by") != "failure"
    return Convergence(
        what=what,
        epochs=epochs,
        seeds=list(seeds),
        baseline=list(baseline),
        plan=list(plan),
        **(_test_figures(pairs) if able else {"equivalent": False}),
        **(ended or {}),
    )


def _test_figures(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The figures of the test."""
    from scipy import stats  # takes half a second and 50 MB, which no training shall pay for

    theirs, ours = np.asarray(pairs).T
    apart = ours - theirs
    mean, error = float(apart.mean()), float(stats.sem(apart))
    reach = float(stats.t.ppf(1 - _LEVEL, len(apart) - 1)) * error
    margin = max(float(theirs.std(ddof=1)), _MIN_MARGIN * abs(float(theirs.mean())))
    within = bool(mean - reach > -margin and mean + reach < margin) or not apart.any()
    return {
        "difference": mean,
        "low": mean - reach,
        "high": mean + reach,
        "margin": margin,
        "equivalent": within and math.isfinite(mean),
    }


def _final_loss(task: Task, plan: Plan) -> float:
    """The loss that a training ends with: on the validation data, or else over its last epoch."""
    with preserve_generators():
        program = lower(task, plan)
        try:
            loss = math.nan
            for _ in range(task.epochs):
                loss = _training_loss(program)
                if (validation := task.roles.validation) is not None:
                    loss = _validation_loss(program, validation)
                program.end_epoch(loss)
            return loss
        finally:
            program.close()


def _training_loss(program: Program) -> float:
    """The loss over an epoch."""
    try:
        while not program.advance(1000).ended:
            pass
        sums = program.read_sums()
    except Exception as error:
        raise explain_error(error, program, None) from error
    return sums["loss"] / (sums["weight"] or math.nan)


def _validation_loss(program: Program, source: Source) -> float:
    try:
        return evaluate(program, source).values["loss"]
    except Exception as error:
        raise explain_error(error, program, None, "validation") from error
