"""Optuna's samplers and pruners, by name, and the epochs after which trials are compared."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import optuna
from optuna import pruners, samplers

from hotloop.core.records.study import ParameterRecord, StudyRecord, Value
from hotloop.errors import StudyError, did_you_mean
from hotloop.hyperparameters.space import Space

SAMPLERS = ("tpe", "cmaes", "gp", "grid", "random")
PRUNERS = ("none", "median", "hyperband", "halving")

_MEDIAN_RUNGS = 8
"""Largest number of comparisons of a trial by the median: each one pauses the trial."""

_MAX_POINTS = 100_000
"""Points of a grid; Optuna lists all of them in each round."""

_HYPERBAND_FACTOR = 3
_HALVING_FACTOR = 4  # Optuna's default


def check_name(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise StudyError(f"{option} {name}", expected="one of " + ", ".join(known), fix=did_you_mean(name, known))


def make_sampler(study: StudyRecord, round_number: int) -> samplers.BaseSampler:
    """Returns a new sampler, whose random numbers depend on the study's seed and the number of the round alone."""
    seed = int(np.random.SeedSequence([study.seed, round_number]).generate_state(1)[0])
    if study.sampler == "tpe":
        return samplers.TPESampler(seed=seed, warn_independent_sampling=False)
    if study.sampler == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if study.sampler == "gp":
        return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if study.sampler == "grid":
        return _Grid(grid(study.space), seed=study.seed)  # one order of the points for all rounds
    return samplers.RandomSampler(seed=seed)


class _Grid(samplers.GridSampler):
    def after_trial(self, *arguments: Any) -> None:
        """Does nothing: Optuna 5.0's method stops `Study.optimize` after the last point, an error outside of it."""


def make_pruner(name: str, epochs: int) -> pruners.BasePruner:
    """Returns a new pruner for trials of at most so many epochs."""
    if name == "median":
        return pruners.MedianPruner()
    if name == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=epochs, reduction_factor=_HYPERBAND_FACTOR)
    if name == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_HALVING_FACTOR)
    return pruners.NopPruner()


def rungs(pruner: str, epochs: int) -> list[int]:
    """Returns the epochs after which the trials of a round are compared, without the last epoch."""
    if pruner == "median":
        return list(range(interval := math.ceil(epochs / _MEDIAN_RUNGS), epochs, interval))
    factor = {"hyperband": _HYPERBAND_FACTOR, "halving": _HALVING_FACTOR}.get(pruner)
    if factor is None:
        return []
    return list(itertools.takewhile(lambda epoch: epoch < epochs, (factor**power for power in itertools.count())))


def grid(space: Space) -> dict[str, list[Value]]:
    """Returns the values of a grid.

    Raises:
        StudyError: a parameter has no finite number of values, or a condition.
    """
    return {name: _grid_values(name, parameter) for name, parameter in space.items() if not parameter.is_fixed}


def _grid_values(name: str, parameter: ParameterRecord) -> list[Value]:
    if parameter.when:
        raise StudyError(f"{parameter.place}: a grid has no conditions", fix="use another --sampler")
    if parameter.choices:
        return list(parameter.choices)
    assert parameter.low is not None and parameter.high is not None
    if not parameter.is_int and parameter.step is None:
        raise StudyError(
            f"{parameter.place}: a grid needs a finite number of values",
            expected="choices such as 0.1,0.2, or :step=",
            fix="or use another --sampler",
        )
    step = parameter.step or 1
    count = math.floor((parameter.high - parameter.low) / step + 1e-9) + 1
    if count > _MAX_POINTS:
        raise _too_many_points_error(f"{parameter.place}: {count:,} values")
    values = [parameter.low + index * step for index in range(count)]
    return [int(value) if parameter.is_int else value for value in values]


def check_settings(study: StudyRecord) -> None:
    """Raises StudyError if the sampler can't search the space."""
    if all(parameter.is_fixed for parameter in study.space.values()):
        raise StudyError(
            "the space has no parameter with several values",
            expected="a range or a choice",
            fix="write for example -p lr=1e-4..1e-1:log",
        )
    if study.sampler == "grid" and (points := math.prod(map(len, grid(study.space).values()))) > _MAX_POINTS:
        raise _too_many_points_error(f"the grid has {points:,} points")


def _too_many_points_error(given: str) -> StudyError:
    return StudyError(
        given, expected=f"a grid of at most {_MAX_POINTS:,} points", fix="give fewer values, or use another --sampler"
    )


def trial_limit(study: StudyRecord) -> int | None:
    """Returns the number of points of a grid; None for other samplers."""
    return math.prod(map(len, grid(study.space).values())) if study.sampler == "grid" else None


@contextmanager
def silence_optuna() -> Iterator[None]:
    """Suppresses Optuna's log lines and its warnings about experimental parts within the context."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def memory_study(study: StudyRecord, sampler: Any = None, trials: Any = ()) -> optuna.Study:
    """Returns a study in memory with these trials.

    The name is the same for all studies: Hyperband assigns a trial to a bracket by the study's name and the number.
    """
    made = optuna.create_study(
        study_name=STUDY_NAME,
        direction=direction(study),
        sampler=sampler or samplers.RandomSampler(seed=0),
        pruner=make_pruner(study.pruner, study.epochs),
    )
    made.add_trials(trials)
    return made


STUDY_NAME = "study"


def direction(study: StudyRecord) -> Literal["minimize", "maximize"]:
    return "minimize" if study.is_minimized else "maximize"
