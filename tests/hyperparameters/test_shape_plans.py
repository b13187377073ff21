"""Plans of a study: found once for each shape of network, and compiled once for trials that differ in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotloop
from hotloop.core.files import user_folders
from hotloop.core.records.study import ParameterRecord, StudyRecord
from hotloop.errors import PlanError
from hotloop.hyperparameters.trial import ShapePlan, expected_trials, shape_key
from hotloop.lowering.compile import package_cache
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.training.run import Run
from tests.support.tasks.studied_task import STUDIED

SPACE = {"width": [4, 8], "lr": [0.01, 0.03, 0.1], "epochs": 1}


def task(**arguments) -> Task:
    names: dict = {}
    exec(STUDIED, names)
    return names["task"](**arguments)


def test_a_shape_is_that_of_trials_that_differ_in_numbers() -> None:
    first = shape_key(task(lr=0.1), Plan())
    assert shape_key(task(lr=0.01), Plan()) == first
    assert shape_key(task(lr=0.1, width=8), Plan()) != first
    assert shape_key(task(lr=0.1), Plan(threads=1)) != first


@pytest.mark.parametrize(
    ("space", "fields", "expected"),
    [
        ({"lr": {"low": 1e-4, "high": 0.1}}, {}, 40),
        ({"width": {"choices": [64, 128]}, "lr": {"low": 1e-4, "high": 0.1}}, {}, 20),
        ({"width": {"choices": [64, 128]}, "epochs": {"choices": [1]}}, {"repeats": 3}, 60),
        ({"width": {"low": 8, "high": 32, "is_int": True, "step": 8.0}}, {}, 10),
        ({"width": {"low": 1, "high": 1000, "is_int": True}}, {}, 1),
        ({"lr": {"low": 1e-4, "high": 0.1}}, {"rungs": [1, 3]}, 20),
        ({"lr": {"low": 1e-4, "high": 0.1}}, {"trials": 0}, 1),
    ],
    ids=["one shape", "a choice", "repeats", "a range of whole numbers", "a shape for each trial", "pruned", "unknown"],
)
def test_a_plan_pays_in_all_trials_of_its_shape(space: dict, fields: dict, expected: int) -> None:
    parameters = {name: ParameterRecord(**value) for name, value in space.items()}
    given = {"trials": 40, "repeats": 1, "rungs": [], **fields}
    assert expected_trials(StudyRecord.model_construct(space=parameters, **given)) == expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's caches, in trial processes as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert user_folders.cache_folder() == tmp_path / "cache" / "hotloop"
    return tmp_path / "cache" / "hotloop"


@pytest.mark.parametrize(("steps", "reason"), [(50, "wouldn't pay"), (150, "compiled now"), (None, "compiled now")])
def test_a_trial_compiles_a_package_of_its_own_only_where_that_pays(
    cache: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, reason: str
) -> None:
    def build(*given: object) -> bytes:
        raise RuntimeError("compiled now")

    monkeypatch.setattr(package_cache, "_build_package", build)
    plan = ShapePlan(Plan(compile="package"), pays_after=100)
    with pytest.raises(PlanError, match=reason):
        plan.lower(task(), steps, lambda line: None)


@pytest.mark.more
def test_trials_whose_own_package_would_not_pay_use_the_plan_of_the_rules(tmp_path: Path, cache: Path) -> None:
    """The rate of a dropout is a constant of the compiled step."""
    source = STUDIED.replace("nn.Dropout(0.1)", "nn.Dropout(drop)").replace(
        "width: int = 4", "width: int = 4, drop: float = 0.1"
    )
    (tmp_path / "task.py").write_text(source)
    space = {"drop": "0.1..0.5", "epochs": 1}
    hotloop.study(tmp_path / "task.py", space, folder=tmp_path / "s", trials=2, progress=False, plan="auto")
    (path,) = (tmp_path / "s/plans").glob("*.toml")
    path.write_text(Plan(compile="package", threads=1).to_toml())
    path.with_suffix(".json").write_text('{"pays_after": 1000000}')
    study = hotloop.study(tmp_path / "task.py", resume=tmp_path / "s", trials=4, progress=False)
    assert [one.state for one in study.trials] == ["complete"] * 4
    assert {Run.open(one.runs[0]).plan.compile for one in study.trials} == {"none"}
    assert "the step's package isn't in the cache" in (tmp_path / "s/logs/0003.txt").read_text()


@pytest.mark.more
def test_six_trials_of_two_shapes_make_two_searches(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "task.py").write_text(STUDIED)
    study = hotloop.study(
        tmp_path / "task.py", SPACE, folder=tmp_path / "s", sampler="grid", plan="auto", jobs=2, progress=False
    )
    assert [one.state for one in study.trials] == ["complete"] * 6
    logs = "".join(path.read_text() for path in (tmp_path / "s/logs").glob("0*.txt"))
    assert logs.count("finding the plan for") == 2
    assert len(list((tmp_path / "s/plans").glob("*.toml"))) == 2
    plans = {one.number: Run.open(one.runs[0]).plan for one in study.trials}
    events = [event["event"] for one in study.trials for event in Run.open(one.runs[0]).journal()]
    assert not {"plan_search", "plan_switch"} & set(events), "each trial has one plan throughout"
    for width in (4, 8):
        assert len({plans[one.number].brief() for one in study.trials if one.params["width"] == width}) == 1
    assert not study.result.exact
    assert study.result.inexact[0].startswith("--plan auto chooses plans by measured times")


@pytest.mark.more
def test_two_shapes_are_compiled_twice_for_six_trials(tmp_path: Path, cache: Path) -> None:
    """A compiled step takes the learning rate as an input, so another rate needs no compilation."""
    (tmp_path / "task.py").write_text(STUDIED)
    study = hotloop.study(
        tmp_path / "task.py",
        SPACE,
        folder=tmp_path / "s",
        sampler="grid",
        plan=Plan(compile="package"),
        progress=False,
    )
    assert [(one.state, one.error) for one in study.trials] == [("complete", "")] * 6
    assert len(list(cache.rglob("*.pt2"))) == 2
