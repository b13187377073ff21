"""Inputs and results of feasibility rules, and the forecast of a training under `auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.plan import BASELINE, Plan


@dataclass(frozen=True)
class Violation:
    """A reason why a plan can't run.

    Attributes:
        axes: axes whose values conflict with the Task, the machine or each other; the axis to change comes first.
        reason: a clause.
        fix: an instruction, beginning with a verb.
        passing: whether the plan may run later, with more free memory.
    """

    axes: tuple[str, ...]
    reason: str
    fix: str
    passing: bool = False


@dataclass(frozen=True)
class FeasibilityInput:
    """The input of a rule; `device` is the plan's."""

    plan: Plan
    facts: TaskFacts
    hardware: Hardware
    device: Device


Rule = Callable[[FeasibilityInput], Iterator[Violation]]


def axis_violations(
    plan: Plan, reasons: Mapping[str, str], other: str, alternative: str, *allowed: object
) -> Iterator[Violation]:
    """Yields a violation with the axis `other` for each axis with neither the baseline's nor an allowed value."""
    for axis, reason in reasons.items():
        default = getattr(BASELINE, axis)
        if getattr(plan, axis) not in (default, *allowed):
            value = "none" if default is None else default
            yield Violation((axis, other), reason, f"use {axis}={value}, or {alternative}")


@dataclass(frozen=True)
class PlanForecast:
    """The expected choice of a training under `auto`.

    Attributes:
        remembered: the proven fastest plan of an earlier race; else None.
        choice: the plan of the rules and of earlier races, used without `remembered`.
        compiled: compiled plans that a search beside the training tries if timed steps show that a compilation pays.
        passed_over, left_open, refused, device: see `PlanOptions`.
    """

    remembered: Plan | None
    choice: RankedPlan
    compiled: list[Plan]
    passed_over: list[str]
    left_open: list[str]
    refused: list[InfeasibleValue]
    device: Device

    @property
    def plan(self) -> Plan:
        """The plan at the start of the training."""
        return self.remembered or self.choice.plan


@dataclass(frozen=True)
class InfeasibleValue:
    axis: str
    value: Any
    violation: Violation


@dataclass(frozen=True)
class RankedPlan:
    """A feasible plan, and a sentence for each of its advantages."""

    plan: Plan
    why: tuple[str, ...]
