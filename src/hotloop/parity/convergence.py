"""Test of equivalence, over several seeds, of the final losses under a plan and under the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hotloop.core.processes import end_reason
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
"""Least margin of equivalence, relative to the baseline's mean loss."""

_LEVEL, _LEAST_SEEDS = 0.05, 3


def check_convergence(
    task: Task, plan: Plan, seeds: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Convergence:
    """Trains a Task to its end, under the baseline and under a plan, with each of `seeds` seeds from the Task's own on.

    After a failed training, Ctrl-C or SIGTERM the result has the losses until then and the reason.

    Raises:
        PlanError: fewer than three seeds.
    """
    check_seeds(seeds)
    numbers = [task.seed + place for place in range(seeds)]
    plans = {"baseline": Plan(device=plan.device, workers=plan.workers), "plan": plan}
    losses: dict[str, list[float]] = {name: [] for name in plans}
    todo = [(number, name) for number in numbers for name in plans]
    done, ended = 0, dict[str, str]()
    try:
        for done, (number, name) in enumerate(todo):
            losses[name].append(_final_loss(replace(task, seed=number), plans[name]))
            progress(done + 1, len(todo))
    except (HotloopError, KeyboardInterrupt) as error:
        number, name = todo[done]
        ended = end_reason(f"the training of the {name} with seed {number}", error)
    what = "train_loss" if task.roles.validation is None else "validation_loss"
    both, seen = (losses["baseline"], losses["plan"]), numbers[: len(losses["baseline"])]
    return compare_losses(*both, what=what, epochs=task.epochs, seeds=seen, ended=ended)


def check_seeds(seeds: int) -> None:
    """Raises PlanError for fewer than three seeds."""
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
    """Tests pairs of losses, seed by seed, for equivalence; a loss that isn't finite is never equivalent.

    Args:
        ended: `ended_by` and `ended` of the record. After a stop the seeds trained both ways are tested; after a
            failure none are.
    """
    pairs = [(theirs, ours) for theirs, ours in zip(baseline, plan, strict=False)]  # a stop may come between both
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
    from scipy import stats  # the import takes 0.5 s and 50 MB

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
