"""The Task of a finder, in a process of the trial server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle

from hotloop.core.plan_request import AUTO, PlanRequest
from hotloop.core.records.study import Value
from hotloop.errors import StudyError
from hotloop.hyperparameters.space import Space, as_text
from hotloop.hyperparameters.study_options import TaskSource
from hotloop.hyperparameters.trial import call_make_task
from hotloop.plan import Plan
from hotloop.task import Task, override_fields
from hotloop.task_file import load_task, named_parameters, task_parameters
from hotloop.tuning.auto import list_options


def fixed_values(space: Space) -> dict[str, Value]:
    """Returns the values of a space.

    Raises:
        StudyError: a parameter has several values.
    """
    for parameter in space.values():
        if not parameter.is_fixed:
            raise StudyError(
                f"{parameter.place} for a finder",
                expected="one value",
                fix="write one value, or leave the parameter out",
            )
    return {name: parameter.choices[0] for name, parameter in space.items()}


def load_finder_task(source: TaskSource, values: Mapping[str, Value]) -> tuple[Task, list[str]]:
    """Returns the Task, and the names of its arguments."""
    if source.make_task is None:
        known = task_parameters(source.reference)
        texts = {name: as_text(value) for name, value in values.items() if name in known}
        task = load_task(source.reference, texts).task
    else:
        function = cloudpickle.loads(source.make_task)
        known = named_parameters(function)
        task = call_make_task(function, {name: value for name, value in values.items() if name in known})
    return override_fields(task, {name: value for name, value in values.items() if name not in known}), list(known)


def rules_plan(task: Task, axes: Mapping[str, Any]) -> Plan:
    """Returns the rules' first plan without a compilation."""
    base = PlanRequest.from_value(AUTO, axes).plan
    return list_options(task, base).uncompiled[0].plan
