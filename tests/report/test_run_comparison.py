"""Comparisons of runs: what differs, which runs form a group, and when a difference is noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.files.run_folder import StoredRun
from hotloop.plan import Plan
from hotloop.report.run_comparison import Comparison, compare_runs, comparison_lines
from tests.support.programs import a_task
from tests.support.stored_runs import write_run


def compared(folder: Path, *, losses: dict[str, list[float]], same_seed: bool = False) -> Comparison:
    """Compares runs with a final validation loss for each learning rate and seed."""
    runs = []
    for rate, values in losses.items():
        for seed, loss in enumerate(values):
            rows = [{"epoch": 1, "step": 4, "validation_loss": loss}]
            path = folder / f"{rate}-{seed}"
            write_run(path, epochs=rows, parameters={"lr": rate}, overrides={"seed": 0 if same_seed else seed})
            runs.append(StoredRun.read(path))
    return compare_runs(runs)


FIGURE = "best epoch: validation loss"


def verdict(comparison: Comparison) -> str:
    return next(one.verdict for one in comparison.differences if one.figure == FIGURE)


def test_runs_that_differ_only_in_the_seed_form_a_group(tmp_path: Path) -> None:
    found = compared(tmp_path, losses={"0.1": [1.0, 1.1, 0.9], "0.2": [2.0, 2.1, 1.9]})
    assert [(group.name, len(group.runs), group.seeds) for group in found.groups] == [
        ("A", 3, [0, 1, 2]),
        ("B", 3, [0, 1, 2]),
    ]
    assert found.settings == {
        "parameter.lr": ["0.1"] * 3 + ["0.2"] * 3,
        "option.seed": [0, 1, 2, 0, 1, 2],
    }


def test_a_difference_is_judged_by_the_noise_of_seeds(tmp_path: Path) -> None:
    assert verdict(compared(tmp_path / "far", losses={"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1, 1.9]})).startswith("beyond")
    assert verdict(compared(tmp_path / "near", losses={"a": [1.0, 1.1, 0.9], "b": [1.05, 1.15, 0.9]})).startswith(
        "within"
    )


def test_the_interval_is_that_of_welch(tmp_path: Path) -> None:
    from scipy.stats import ttest_ind

    before, after = [1.0, 1.2, 0.9, 1.1], [1.6, 1.1, 1.3]
    found = compared(tmp_path, losses={"a": before, "b": after})
    one = next(one for one in found.differences if one.figure == FIGURE)
    expected = ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((expected.low, expected.high))


def test_too_few_seeds_are_said_with_their_number(tmp_path: Path) -> None:
    few = verdict(compared(tmp_path / "few", losses={"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1]}))
    assert few == "noise unknown: a group needs 3 runs with different seeds, B has 2"
    same = verdict(compared(tmp_path / "same", losses={"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1, 1.9]}, same_seed=True))
    assert "A has 1 and B has 1" in same


def test_another_plan_is_another_group(tmp_path: Path) -> None:
    runs = [
        StoredRun.read(write_run(tmp_path / "a", plan=Plan())),
        StoredRun.read(write_run(tmp_path / "b", plan=Plan(compile="step"))),
    ]
    found = compare_runs(runs)
    assert found.settings == {"plan.compile": ["none", "step"]} and len(found.groups) == 2


def test_runs_on_other_data_are_not_of_one_group(tmp_path: Path) -> None:
    """Such as the folds of a cross-validation, each with its own seed."""
    runs = [write_run(tmp_path / f"{n}", overrides={"seed": n}, data=f"{n}" * 32) for n in range(3)]
    found = compare_runs([StoredRun.read(run) for run in runs])
    assert found.settings["task.content"] == ["0" * 12, "1" * 12, "2" * 12]
    assert [group.runs for group in found.groups] == [[str(run)] for run in runs]


@pytest.mark.parametrize("unknown", [{"data": ""}, {"unknown_data": ["Photos"]}], ids=["earlier run", "own data set"])
def test_unknown_data_are_said_to_be_unknown(tmp_path: Path, unknown: dict[str, Any]) -> None:
    runs = [
        write_run(
            tmp_path / f"{rate}-{seed}",
            epochs=[{"epoch": 1, "step": 4, "validation_loss": rate + seed / 100}],
            parameters={"lr": rate},
            overrides={"seed": seed},
            **unknown,
        )
        for rate in (1.0, 2.0)
        for seed in range(3)
    ]
    found = compare_runs([StoredRun.read(run) for run in runs])
    assert [group.unknown for group in found.groups] == ["data", "data"]
    assert "if the data of a group's runs is the same, which is unknown" in verdict(found)
    said = comparison_lines(found)
    assert "Whether the data of the runs in group A is the same is unknown." in said
    alone = comparison_lines(compare_runs([StoredRun.read(run) for run in runs[:3]]))
    assert not any("differ in nothing" in line for line in alone)


def test_folds_trained_from_python_are_told_apart(tmp_path: Path) -> None:
    x, y = torch.randn(30, 4, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3

    def task(fold: int, **fields: Any) -> hotloop.Task:
        held = torch.arange(30) % 3 == fold
        return a_task(data=(x[~held], y[~held]), validation=(x[held], y[held]), model=lambda: nn.Linear(4, 3), **fields)

    def trained(name: str, made: hotloop.Task) -> StoredRun:
        return StoredRun.read(hotloop.fit(made, run=tmp_path / name, plan="baseline", progress=False).path)

    folds = [trained(f"fold{fold}", task(fold)) for fold in range(3)]
    assert len(compare_runs(folds).groups) == 3
    seeds = [trained(f"seed{seed}", task(0, seed=seed)) for seed in range(3)]
    (group,) = compare_runs(seeds).groups
    assert group.unknown == "code"  # a Task from Python has no file
    others = [trained("rate", task(0, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))), seeds[0]]
    assert len(compare_runs(others).groups) == 2
