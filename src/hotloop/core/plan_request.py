"""The user's request for a plan: a name, a file or a Plan, and single axes that override its values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotloop.errors import REMOVED, PlanError, did_you_mean, shorten, type_name
from hotloop.plan import Plan, axes_dropped_with

AUTO, BASELINE = "auto", "baseline"

EXPECTED_PLAN = f"{AUTO}, {BASELINE}, or a TOML file"

_REPLAY = "replay:"


def replayed_run(given: Any, axes: Mapping[str, Any] | None = None) -> Path | None:
    """Returns the run of a plan `replay:RUN`, whose plans another run uses at the same steps; None for other plans.

    Raises:
        PlanError: the folder has no run, or single axes are set as well.
    """
    if not isinstance(given, str) or not given.startswith(_REPLAY):
        return None
    path = Path(given.removeprefix(_REPLAY))
    if not (path / "run.json").is_file():
        raise PlanError(
            f"no run at {shorten(str(path))}", expected=f"{_REPLAY} and a run's folder", fix="check the path"
        )
    if axes:
        raise PlanError(
            f"{_REPLAY}{path} together with {', '.join(axes)}",
            expected="the plans of that run as they are",
            fix="leave out the single axes",
        )
    return path


AXES_BESIDE_AUTO = {"device", "workers"}
"""Axes that leave the choice of the others to `auto`, if no plan is given."""


@dataclass(frozen=True)
class PlanRequest:
    """A requested plan.

    Attributes:
        plan: the plan; its `model_fields_set` are the axes that the user set.
        is_auto: whether the rules choose the other axes; otherwise they have the baseline's values.
        is_explicit: whether the user asked for `is_auto`; automatic choices by default print no line.
    """

    plan: Plan
    is_auto: bool = False
    is_explicit: bool = True

    @classmethod
    def from_value(cls, given: Plan | str | Path | None, axes: Mapping[str, Any] | None = None) -> PlanRequest:
        """Returns the request for a Plan, `auto`, `baseline`, a TOML file, or None for the baseline.

        Args:
            axes: values that override the plan's. Text, as from a command line, is parsed as the axis's type; `none` is
                None where the axis allows None. An override of `parallel` drops the plan's axes of the other value of
                    `parallel`.

        Raises:
            PlanError: no such file, axis or value.
        """
        overrides = {axis: _parse_axis_value(axis, value) for axis, value in (axes or {}).items()}
        if isinstance(given, Plan):
            plan = given
        elif given in (None, AUTO, BASELINE):
            plan = Plan()
        elif isinstance(given, str | Path):
            plan = _read_plan(Path(given))
        else:
            raise PlanError(
                f"the plan is {type_name(given)}",
                expected="a hotloop.Plan, 'auto', 'baseline', or the path of a TOML file",
                fix="write hotloop.Plan(optimizer='fused') for single axes",
            )
        dropped = axes_dropped_with(plan.parallel, overrides.get("parallel", plan.parallel))
        own = {axis: getattr(plan, axis) for axis in plan.model_fields_set if axis not in dropped}
        return cls(Plan(**(own | overrides)), given == AUTO)

    @classmethod
    def with_auto_default(cls, given: Plan | str | Path | None, axes: Mapping[str, Any] | None = None) -> PlanRequest:
        """Returns a request whose default is `auto`, or the baseline if an axis of the computation is set."""
        if given is not None or (axes or {}).keys() - AXES_BESIDE_AUTO:
            return cls.from_value(given, axes)
        return replace(cls.from_value(AUTO, axes), is_explicit=False)

    def with_split(self, before: Plan, ranks: int) -> PlanRequest:
        """Returns the request with the stage boundaries of an earlier run, unless the user chose them.

        Other boundaries change sums in the last bits.

        Args:
            ranks: number of ranks, also if the plan doesn't set it.
        """
        requested = (self.plan.parallel, ranks, self.plan.pipeline, self.plan.split)
        if requested != ("stages", before.ranks, before.pipeline, "auto"):
            return self
        return replace(self, plan=self.plan.with_axes(split=before.split))


def plan_origin(given: Any, axes: Mapping[str, Any]) -> str:
    """Returns the option that chose a new run's plan, for a line such as `plan: optimizer=fused (default)`.

    The help of `hotloop train` has a table of these options. The text is empty for a plan that the user named.
    """
    if given is None:
        return "" if axes.keys() - AXES_BESIDE_AUTO else " (default)"
    return " (--plan auto)" if given == AUTO else ""


def _read_plan(path: Path) -> Plan:
    try:
        is_file = path.is_file()
    except OSError:  # the name is too long
        is_file = False
    if not is_file:
        if instead := REMOVED.get(f"plan={path}"):
            raise PlanError(f"the plan {shorten(str(path))} was removed", fix=instead)
        near = did_you_mean(str(path), (AUTO, BASELINE))
        fix = f"check the spelling and the path{f': {near}' if near else ''}"
        raise PlanError(f"no plan at {shorten(str(path))}", expected=EXPECTED_PLAN, fix=fix)
    return Plan.read(path)


def _parse_axis_value(axis: str, value: Any) -> Any:
    """Returns command-line text as a number where it spells a number, and `none` as None where the axis allows None."""
    field = Plan.model_fields.get(axis)
    if value == "none" and field is not None and field.default is None:
        return None
    if field is not None and field.annotation is str:  # a Sequential's modules have numbers as names
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value) else value
