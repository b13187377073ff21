"""What the user asked to run a Task with: a plan by name, in a file or as a value, and single axes on top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotloop.errors import PlanError, shorten, type_name
from hotloop.plan import Plan, axes_dropped_with

AUTO, BASELINE, ARRAYS = "auto", "baseline", "arrays"

EXPECTED_PLAN = f"{AUTO}, {BASELINE}, {ARRAYS}, or a TOML file"


@dataclass(frozen=True)
class PlanRequest:
    """A plan that was asked for.

    Attributes:
        plan: its `model_fields_set` are the axes that the user set.
        auto: whether the rules fill in the others; else they are the baseline's.
        asked: whether anybody asked for that; what is chosen without a word is not worth a line.
    """

    plan: Plan
    is_auto: bool = False
    is_explicit: bool = True

    @classmethod
    def from_value(cls, given: Plan | str | Path | None, axes: Mapping[str, Any] | None = None) -> PlanRequest:
        """What `given` means: a plan, `is_auto`, `baseline`, `arrays`, a TOML file, or None for the baseline.

        Args:
            axes: set on top; text as on a command line is read as the axis' type, and `none` where an axis has it. What
                the plan says of another value of `parallel` goes with that.

        Raises:
            PlanError: no such file, axis or value.
        """
        on_top = {axis: _parse_axis_value(axis, value) for axis, value in (axes or {}).items()}
        if isinstance(given, Plan):
            plan = given
        elif given in (None, AUTO, BASELINE):
            plan = Plan()
        elif given == ARRAYS:
            plan = Plan(engine="arrays")
        elif isinstance(given, str | Path):
            plan = _read_plan(Path(given))
        else:
            raise PlanError(
                f"the plan is {type_name(given)}",
                expected="a hotloop.Plan, 'auto', 'baseline', 'arrays', or the path of a TOML file",
                fix="write hotloop.Plan(optimizer='fused') for single axes",
            )
        gone = axes_dropped_with(plan.parallel, on_top.get("parallel", plan.parallel))
        kept = {axis: getattr(plan, axis) for axis in plan.model_fields_set if axis not in gone}
        return cls(Plan(**{**kept, **on_top}), given == AUTO)

    @classmethod
    def with_auto_default(cls, given: Plan | str | Path | None, axes: Mapping[str, Any] | None = None) -> PlanRequest:
        """The same, but without a plan `is_auto`; with axes on top that say how to compute, the baseline with those."""
        if given is not None or (axes or {}).keys() - {"device", "workers"}:
            return cls.from_value(given, axes)
        return replace(cls.from_value(AUTO, axes), is_explicit=False)

    def with_split(self, before: Plan, ranks: int) -> PlanRequest:
        """Where stages are to begin where a run had them, unless it is said; their sums differ in the last bits else.

        Args:
            ranks: how many there are, whether the plan names them or not.
        """
        if (self.plan.parallel, ranks, self.plan.pipeline, self.plan.split) != (
            "stages",
            before.ranks,
            before.pipeline,
            "auto",
        ):
            return self
        return replace(self, plan=self.plan.with_axes(split=before.split))


def _read_plan(path: Path) -> Plan:
    try:
        found = path.is_file()
    except OSError:  # a name that is too long
        found = False
    if not found:
        raise PlanError(
            f"no plan at {shorten(str(path))}", expected=EXPECTED_PLAN, fix="check the spelling and the path"
        )
    try:
        return Plan.read(path)
    except PlanError as error:
        inside = "" if str(path) in error.given else f"{path}: "
        raise PlanError(f"{inside}{error.given}", expected=error.expected, fix=error.fix) from None


def _parse_axis_value(axis: str, value: Any) -> Any:
    """A command line's text as a number where it spells one, and as None where the axis may be left open."""
    field = Plan.model_fields.get(axis)
    if value == "none" and field is not None and field.default is None:
        return None
    if field is not None and field.annotation is str:  # modules of a Sequential have numbers for names
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value) else value
