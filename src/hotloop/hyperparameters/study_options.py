"""The options of a study."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.core.format import parse_seconds
from hotloop.core.plan_request import AUTO, BASELINE, PlanRequest
from hotloop.core.records.study import RULES_PLAN, StudyRecord
from hotloop.distributed.ray.cluster import check_installed
from hotloop.errors import StudyError
from hotloop.hyperparameters import samplers
from hotloop.hyperparameters.results import check_constraints
from hotloop.plan import Plan

PLAN_FILE = "plan.toml"

PROCESSES, RAY = JOBS_ON = ("processes", "ray")

_DEFAULTS: dict[str, Any] = {
    "trials": 20,
    "sampler": "tpe",
    "pruner": "none",
    "round_size": 8,
    "seed": 0,
    "repeats": 1,
    "constraints": [],
}
_OPTIONS = dict(
    sampler="--sampler",
    pruner="--prune",
    round_size="--round",
    seed="--seed",
    repeats="--repeats",
    constraints="--require",
)


def _as_words(value: Any) -> str:
    return ", ".join(value) or "none" if isinstance(value, list | tuple) else str(value)


def _other_setting_error(given: str, own: str) -> StudyError:
    return StudyError(
        f"{given}, and the study has {own}",
        expected="the study's own value",
        fix="leave the option out, or start a new study",
    )


@dataclass(frozen=True)
class StudyOptions:
    """How to search; the attributes are arguments of `hotloop.study`.

    None stands for the default of a new study, and for the study's own value when an existing study goes on.

    Attributes:
        axes: plan axes that are set.
    """

    trials: int | None = None
    sampler: str | None = None
    pruner: str | None = None
    round_size: int | None = None
    jobs: int | None = None
    seed: int | None = None
    repeats: int | None = None
    constraints: Sequence[str] | None = None
    time_limit: str | None = None
    plan: Plan | str | Path | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    jobs_on: str = PROCESSES

    def check(self) -> None:
        """Raises HotloopError if an option has no such value."""
        samplers.check_name("--sampler", self.settings["sampler"], samplers.SAMPLERS)
        samplers.check_name("--prune", self.settings["pruner"], samplers.PRUNERS)
        samplers.check_name("--jobs-on", self.jobs_on, JOBS_ON)
        if self.jobs_on == RAY:
            check_installed("--jobs-on ray", "--jobs-on processes")
        check_constraints(self.constraints or ())
        numbers = {"--trials": self.trials, "--round": self.round_size, "--jobs": self.jobs, "--repeats": self.repeats}
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise StudyError(f"{option} {number}", expected="1 or more")
        if self.seed is not None and self.seed < 0:
            raise StudyError(f"--seed {self.seed}", expected="0 or more")
        if self.time_limit is not None:
            parse_seconds(self.time_limit, "time-limit")
        PlanRequest.from_value(self.plan, self.axes)

    @property
    def device(self) -> str | None:
        """The device of this machine that all trials use; None for any device, and for the machines of Ray."""
        plan = PlanRequest.from_value(AUTO if self.plan is None else self.plan, self.axes).plan
        return plan.device if "device" in plan.model_fields_set and self.jobs_on != RAY else None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a new study, by their names in StudyRecord."""
        given = {name: getattr(self, name) for name in _DEFAULTS}
        chosen = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
        return {**chosen, "plan": self.plan_name, "axes": dict(self.axes)}

    @property
    def plan_name(self) -> str:
        """The plan as in StudyRecord."""
        if self.plan is None:
            return RULES_PLAN
        return str(self.plan) if self.plan in (AUTO, BASELINE) else PLAN_FILE

    def check_same(self, study: StudyRecord, path: Path) -> None:
        """Raises StudyError if a given setting differs from that of the study in the folder."""
        for name, option in _OPTIONS.items():
            given, own = getattr(self, name), getattr(study, name)
            given = list(given) if isinstance(given, tuple) else given
            if given is not None and given != own:
                raise _other_setting_error(f"{option} {_as_words(given)}", _as_words(own))
        if self.plan is not None:
            request = PlanRequest.from_value(self.plan)
            is_same = self.plan_name == study.plan and (
                study.plan != PLAN_FILE or Plan.read(path / PLAN_FILE) == request.plan
            )
            if not is_same:
                given = self.plan.brief() if isinstance(self.plan, Plan) else self.plan
                raise _other_setting_error(f"--plan {given}", study.plan)
        for axis, value in self.axes.items():
            if study.axes.get(axis) != value:
                own = study.axes.get(axis, "no value for it")
                raise _other_setting_error(f"--set {axis}={value}", str(own))

    @property
    def until(self) -> float:
        """When no further round begins, in seconds by `time.monotonic()`."""
        return math.inf if self.time_limit is None else time.monotonic() + parse_seconds(self.time_limit, "time-limit")
