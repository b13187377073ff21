"""Rounds propose by seed and number of the round alone, and pruning compares what the whole round has reached."""

from __future__ import annotations

import pytest

from hotloop.core.records.study import StudyRecord
from hotloop.errors import StudyError
from hotloop.hyperparameters.samplers import (
    PRUNERS,
    SAMPLERS,
    check_settings,
    make_sampler,
    memory_study,
    rungs,
    silence_optuna,
    trial_limit,
)
from hotloop.hyperparameters.space import parse_space, sample
from hotloop.hyperparameters.trial_rounds import prune

SPACE = {"lr": "0.1..1:step=0.1", "width": [1, 2, 4], "units": "1..3:int"}


def record(**fields) -> StudyRecord:
    given = dict(id="", name="x", created="", source=None, space=parse_space(SPACE), arguments=list(SPACE))
    given |= dict(sampler="tpe", pruner="none", seed=3, round_size=4, repeats=1, plan="rules", figure="validation_loss")
    given |= dict(is_minimized=True, epochs=9, rungs=[], task_epochs=9, task_seed=0, versions={})
    return StudyRecord(**given | fields)


def proposals(study: StudyRecord, rounds: int = 4) -> list[dict]:
    """The parameters of some rounds whose trials' values follow from the parameters."""
    trials: list = []
    with silence_optuna():
        for number in range(rounds):
            memory = memory_study(study, make_sampler(study, number), trials)
            asked = [memory.ask() for _ in range(study.round_size)]
            for trial in asked:
                sample(trial, study.space)
            for trial in asked:
                memory.tell(trial.number, trial.params["lr"] * trial.params["width"])
            trials = memory.get_trials()
    return [trial.params for trial in trials]


@pytest.mark.parametrize(
    "sampler", [name for name in SAMPLERS if name != "gp"] + [pytest.param("gp", marks=pytest.mark.slow)]
)
def test_the_same_seed_proposes_the_same(sampler: str) -> None:
    study = record(sampler=sampler)
    first = proposals(study)
    assert proposals(study) == first
    assert len({str(params) for params in first}) > 4
    if sampler != "grid":
        assert proposals(record(sampler=sampler, seed=4)) != first


def test_a_grid_has_each_point_once() -> None:
    study = record(sampler="grid", space=parse_space({"width": [1, 2, 4], "lr": [0.1, 0.2]}), round_size=3)
    assert trial_limit(study) == 6
    assert len({str(params) for params in proposals(study, 2)}) == 6


def test_a_grid_needs_a_finite_number_of_values() -> None:
    with pytest.raises(StudyError, match="a grid needs a finite number of values"):
        check_settings(record(sampler="grid", space=parse_space({"lr": "0.1..1"})))


@pytest.mark.parametrize("space", [{"width": "1..1000000000:int"}, dict.fromkeys("abcd", "1..100:int")])
def test_a_grid_of_too_many_points_is_one_line(space: dict) -> None:
    with pytest.raises(StudyError, match="expected a grid of at most 100,000 points"):
        check_settings(record(sampler="grid", space=parse_space(space)))


def test_a_space_of_fixed_values_is_no_search() -> None:
    with pytest.raises(StudyError, match="no parameter with several values"):
        check_settings(record(space=parse_space({"lr": 1})))


def test_the_epochs_of_comparison_end_before_the_last() -> None:
    assert [rungs(pruner, 9) for pruner in PRUNERS] == [[], [2, 4, 6, 8], [1, 3], [1, 4]]
    assert [rungs(pruner, 1) for pruner in PRUNERS] == [[], [], [], []]


def pruned(pruner: str, values: list[float], epoch: int) -> set[int]:
    study = record(pruner=pruner, rungs=rungs(pruner, 9))
    with silence_optuna():
        memory = memory_study(study)
        for value in values:
            memory.ask().report(value, epoch)
        return prune(study, memory, range(len(values)))


def test_halving_compares_all_trials_of_the_round() -> None:
    """In Optuna's own order the first trials would pass, since nothing was there to compare them with."""
    values = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert pruned("halving", values, 1) == {0, 1, 2, 3, 4, 5}
    backwards = pruned("halving", values[::-1], 1)
    assert backwards == {7 - number for number in (0, 1, 2, 3, 4, 5)}


def test_nothing_is_pruned_without_a_pruner() -> None:
    assert pruned("none", [0.8, 0.1], 1) == set()
