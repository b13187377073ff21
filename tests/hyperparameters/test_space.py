"""The space of hyper-parameters: its forms, its conditions, and a line with the place for each mistake."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from hotloop.core.records.study import ParameterRecord
from hotloop.errors import StudyError
from hotloop.hyperparameters.space import (
    all_params,
    as_text,
    check_names,
    parse_options,
    parse_space,
    read_space,
    sample,
)

FORMS = {
    "lr=1e-4..1e-1:log": dict(low=1e-4, high=1e-1, log=True),
    "lr=.5...9": dict(low=0.5, high=0.9),
    "shift=-2..-1": dict(low=-2.0, high=-1.0),
    "units=16..256:int": dict(low=16.0, high=256.0, is_int=True),
    "units=16..256:int:log": dict(low=16.0, high=256.0, is_int=True, log=True),
    "dropout=0..0.5:step=0.1": dict(low=0.0, high=0.5, step=0.1),
    "width=0.5,1,2": dict(choices=[0.5, 1, 2]),
    "norm=true,none,batch": dict(choices=[True, None, "batch"]),
    "optimizer=sgd": dict(choices=["sgd"]),
    "folder=../data": dict(choices=["../data"]),
}


@pytest.mark.parametrize("text", FORMS)
def test_a_form_is_read(text: str) -> None:
    (parameter,) = parse_options([text]).values()
    assert parameter.model_dump(exclude={"place"}) == ParameterRecord(**FORMS[text]).model_dump(exclude={"place"})


MISTAKES = {
    "lr=1e-1..1e-4": "-p lr=1e-1..1e-4: the range is reversed; expected the smaller end first. Write 0.0001..0.1",
    "lr=1..1": "-p lr=1..1: the range is empty",
    "lr=0..1:log": "-p lr=0..1:log: a log range begins above 0",
    "lr=1..x": "-p lr=1..x: 'x' is no number",
    "lr=1..inf": "-p lr=1..inf; expected finite ends",
    "lr=1..2:lgo": "-p lr=1..2:lgo: ':lgo'; expected :log",
    "n=1.5..3:int": "-p n=1.5..3:int: an :int range has whole ends",
    "n=1..2:step=0": "-p n=1..2:step=0: step=0",
    "n=1,,2": "-p n=1,,2; expected a value between two commas",
    "n=1,1": "-p n=1,1: 1 is there twice",
    "lr": "-p 'lr'; expected name=",
    "lr=": "-p 'lr='; expected name=",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_one_line_with_the_place(text: str) -> None:
    with pytest.raises(StudyError) as error:
        parse_options([text])
    assert str(error.value).startswith(MISTAKES[text])
    assert "\n" not in str(error.value)


def test_a_name_that_is_given_twice_is_a_mistake() -> None:
    with pytest.raises(StudyError, match="expected one -p for 'lr'"):
        parse_options(["lr=1,2", "lr=3"])


SPACE = """
momentum = { range = "0.5..0.9", when = { optimizer = "sgd" } }
optimizer = ["sgd", "adam"]
lr = { low = 1e-4, high = 0.1, log = true }
batch_size = 64
"""


def test_a_file_has_conditions_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    space = check_names(read_space(tmp_path / "space.toml"), ["lr", "optimizer", "momentum"], ())
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    found = []
    for _ in range(12):
        sample(trial := study.ask(), space)
        found.append(all_params(space, trial.params))
    assert {params["optimizer"] for params in found} == {"sgd", "adam"}
    assert all(("momentum" in params) == (params["optimizer"] == "sgd") for params in found)
    assert all(params["batch_size"] == 64 for params in found)


TABLE_MISTAKES = {
    'lr = "2..1"': "space.toml: lr = '2..1': the range is reversed",
    "lr = [": "space.toml: Invalid value (at end of document)",
    "a = 1\nlr = 1..2": "space.toml: Expected newline or end of document after a statement (at line 2, column 7)",
    "lr = [1, 1]": "space.toml: lr = [1, 1]: 1 is there twice",
    "lr = { low = 1 }": "space.toml: lr = {'low': 1}; expected low, high and step as numbers",
    'lr = { lwo = 1, range = "1..2" }': "space.toml: lr = {'lwo': 1, 'range': '1..2'}: 'lwo'; expected one of low",
    "lr = []": "space.toml: lr = []; expected one value or more",
    "lr = [[1], [2]]": "space.toml: lr = [[1], [2]]: a list; expected numbers",
    'lr = { range = "1..2", when = 3 }': "space.toml: lr = {'range': '1..2', 'when': 3}: when is an int",
    'lr = { range = "1..2", log = true }': "space.toml: lr = {'range': '1..2', 'log': True}: log beside range; expected log",
    "lr = { choices = [1, 2], step = 1 }": "space.toml: lr = {'choices': [1, 2], 'step': 1}: step beside choices",
    'lr = { low = 1, high = 2, log = "no" }': "space.toml: lr = {'low': 1, 'high': 2, 'log': 'no'}; expected log and int",
    'o = ["sgd", "adam"]\nm = { value = 1, when = { o = "sdg" } }': (
        "space.toml: m = {'value': 1, 'when': {'o': 'sdg'}}: when o is 'sdg'; expected one of sgd, adam. Did you mean 'sgd'?"
    ),
}


@pytest.mark.parametrize("text", TABLE_MISTAKES)
def test_a_mistake_in_a_file_is_one_line_with_the_place(text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text(text)
    with pytest.raises(StudyError) as error:
        read_space(Path("space.toml"))
    assert str(error.value).startswith(TABLE_MISTAKES[text])


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"lrr": "1..2"}, "lrr = '1..2': task() has no parameter 'lrr'; expected one of lr, "),
        ({"lr": {"range": "1..2", "when": {"momentum": 1}}}, "when names 'momentum'"),
        ({"lr": {"value": 1, "when": {"seed": 1}}, "seed": {"value": 1, "when": {"lr": 1}}}, "circular"),
        ({"batch_size": "0..4"}, "batch_size is 0.0; expected whole numbers from 1 on"),
        ({"epochs": ["many"]}, "epochs is 'many'"),
        ({"seed": "0.5..4"}, "seed is 0.5"),
        ({"layers": "1..2.5"}, "layers takes whole numbers"),
        ({"layers": "1..4:step=0.5"}, "layers takes whole numbers; expected whole ends and steps"),
    ],
)
def test_a_name_or_a_condition_that_is_unknown_is_one_line(table: dict, line: str) -> None:
    with pytest.raises(StudyError) as error:
        check_names(parse_space(table), ["lr", "layers"], {"layers", "batch_size"})
    assert line in str(error.value)


def test_a_condition_names_none_and_true_as_texts() -> None:
    table = {"norm": "none,batch", "bias": [True, False]}
    space = parse_space(table | {"depth": {"value": 1, "when": {"norm": "none", "bias": "true"}}})
    assert "depth" in all_params(space, {"norm": None, "bias": True})
    assert "depth" not in all_params(space, {"norm": "batch", "bias": True})


def test_a_range_of_a_whole_number_parameter_has_whole_numbers() -> None:
    space = check_names(
        parse_space({"layers": "1..4", "batch_size": "8..64:log"}),
        ["layers"],
        {"layers", "batch_size"},
    )
    assert all(parameter.is_int for parameter in space.values())


@pytest.mark.parametrize(("value", "text"), [(0.1, "0.1"), (1e-07, "1e-07"), (True, "true"), (None, "none"), (3, "3")])
def test_a_value_is_written_as_the_command_line_takes_it(value: object, text: str) -> None:
    assert as_text(value) == text
