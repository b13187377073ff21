"""A Task's field that is of the wrong kind is said to be so when the Task is made, in one line."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import hotloop
from hotloop.errors import PlanError, TaskError
from tests.support.programs import a_task


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"loss": nn.CrossEntropyLoss}, "the loss is the class CrossEntropyLoss itself"),
        ({"stop_below": "x"}, "stop_below='x'; expected a number"),
        ({"stop_below": float("nan")}, "stop_below=nan; expected a number"),
        ({"clip_norm": float("nan")}, "clip_norm=nan; expected a number"),
        ({"clip_value": 0}, "clip_value=0; expected more than 0"),
        ({"epochs": True}, "epochs=True; expected a whole number"),
        ({"classes": 3}, "classes=3; expected a list of the classes' names"),
        ({"classes": "abc"}, "classes='abc'; expected a list"),
        ({"classes": ["a", 1]}, "classes has 1; expected the classes' names"),
        ({"name": 3}, "name=3; expected a text"),
        ({"monitor": 3}, "monitor=3; expected a figure's name"),
        ({"shuffle": "yes"}, "shuffle='yes'; expected True or False"),
        ({"schedule_every": "day"}, "schedule_every='day'"),
        ({"model": 3}, "model is"),
    ],
)
def test_a_wrong_field_is_named_at_once(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=re.escape(says)) as caught:
        a_task(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields", [{"stop_below": 0}, {"stop_below": -1.5}, {"classes": ("a", "b")}, {"shuffle": False}]
)
def test_a_right_one_is_taken(fields: dict[str, Any]) -> None:
    a_task(**fields)


def test_what_is_no_task_or_no_plan_is_named() -> None:
    with pytest.raises(TaskError, match=r"^fit got an int; expected a hotloop.Task"):
        hotloop.fit(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^the plan is a dict; expected a hotloop.Plan"):
        hotloop.fit(a_task(), plan={"optimizer": "fused"})  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [3, None])
def test_a_schedule_that_returns_no_scheduler_is_named(made: Any) -> None:
    with pytest.raises(TaskError, match=r"the schedule factory returned .*; expected a torch.optim.lr_scheduler"):
        hotloop.lower(a_task(schedule=lambda optimizer: made), hotloop.Plan())
