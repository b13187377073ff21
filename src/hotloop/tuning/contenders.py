"""The plans of a race, each with a name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.format import parse_seconds
from hotloop.core.plan_request import BASELINE as BY_NAME
from hotloop.core.plan_request import PlanRequest
from hotloop.core.processes import Deadline
from hotloop.errors import PlanError
from hotloop.plan import Plan

PlanReference = Plan | str | Path


def check_comparable(plan: Plan) -> None:
    """Raises PlanError for a plan whose steps can't be timed or compared one by one."""
    if plan.parallel == "async":
        raise PlanError(
            "parallel=async, whose steps wait for the gradients of workers",
            expected="a plan whose steps can be run one by one",
            fix="train with it, or use parallel=none here",
        )


@dataclass(frozen=True)
class RaceSpec:
    """Plans and time limit of a race, see `race`; `axes` are set on top of each plan except the baseline."""

    plans: Sequence[PlanReference]
    baseline: PlanReference = BY_NAME
    devices: Sequence[str] | None = None
    axes: Mapping[str, Any] | None = None
    time_limit: str | None = None

    def deadline(self, began: float) -> Deadline:
        """Returns the deadline of a race that began at `began`, by `time.monotonic()`."""
        return Deadline.from_limit(
            None if self.time_limit is None else parse_seconds(self.time_limit, "time-limit"), began
        )

    def requested_plans(self) -> tuple[dict[str, PlanRequest], str]:
        """Returns the requests by name, and the baseline's name.

        Raises:
            PlanError: there is a single plan, or a plan that doesn't exist or can't be raced.
        """
        self.deadline(0.0)
        plans = [*([] if self.baseline in self.plans else [self.baseline]), *self.plans]
        base = plans.index(self.baseline)
        if self.axes and len(plans) == 1:
            on_top = ", ".join(f"{axis}={value}" for axis, value in self.axes.items())
            raise PlanError(
                f"{on_top}, and no plan to set it on: {_name(plans[0])} races as it is, to be compared with",
                fix="name another plan, such as --plans baseline,auto",
            )
        found: dict[str, PlanRequest] = {}
        names: dict[int, str] = {}
        for device in self.devices or (None,):
            for number, plan in enumerate(plans):
                axes = {} if number == base else dict(self.axes or {})
                where = f" on {device}" if len(self.devices or ()) > 1 else ""
                name = _unused_name(_name(plan), axes, where, found)
                found[name] = PlanRequest.from_value(plan, axes if device is None else {**axes, "device": device})
                check_comparable(found[name].plan)
                names.setdefault(number, name)
        if len(found) < 2:
            raise PlanError(
                f"one plan alone to race: {_name(plans[0])}",
                expected="two or more",
                fix="name another with --plans, such as --plans baseline,auto, or another device with --devices",
            )
        return found, names[base]


def _name(plan: PlanReference) -> str:
    return plan.brief() if isinstance(plan, Plan) else str(plan)


def _unused_name(name: str, axes: Mapping[str, Any], where: str, taken: Mapping[str, Any]) -> str:
    """Returns the plan's name, with its axes if that is taken, and else with a number."""
    with_axes = " ".join([name, *(f"{axis}={value}" for axis, value in axes.items())])
    numbered = (f"{with_axes}{where} ({number})" for number in itertools.count(2))
    return next(one for one in itertools.chain([name + where, with_axes + where], numbered) if one not in taken)
