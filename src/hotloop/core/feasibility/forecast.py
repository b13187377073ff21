"""What a rule of feasibility looks at, and what it may find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hotloop.core.records.hardware import Device, Hardware
from hotloop.core.records.training import TaskFacts
from hotloop.plan import Plan


@dataclass(frozen=True)
class Violation:
    """Why a plan can't be run.

    Attributes:
        axes: those whose values don't go with the Task, the machine, or each other; the one to change first.
        reason: a clause in plain words.
        fix: what to do, beginning with a verb.
        passing: whether it may be run another time, when there is more memory.
    """

    axes: tuple[str, ...]
    reason: str
    fix: str
    passing: bool = False


@dataclass(frozen=True)
class FeasibilityInput:
    """What a rule looks at; `device` is the plan's."""

    plan: Plan
    facts: TaskFacts
    hardware: Hardware
    device: Device


Rule = Callable[[FeasibilityInput], Iterator[Violation]]


@dataclass(frozen=True)
class PlanForecast:
    """What a training under `auto` does, as far as that is known before it.

    Attributes:
        remembered: what it runs, where an earlier race found it the fastest and proved it; else
        choice: what it runs, by the rules and by what races found, unless
        compiled: one of these, compiled or recorded, turns out to be faster, and is proven; if some timed steps say that
            trying it pays.
        passed_over, left_open, refused, device: see `PlanOptions`.
    """

    remembered: Plan | None
    choice: RankedPlan
    compiled: list[RankedPlan]
    passed_over: list[str]
    left_open: list[str]
    refused: list[InfeasibleValue]
    device: Device

    @property
    def plan(self) -> Plan:
        """What a training begins with."""
        return self.remembered or self.choice.plan


@dataclass(frozen=True)
class InfeasibleValue:
    """A value of one axis that can't be run in a plan."""

    axis: str
    value: Any
    violation: Violation


@dataclass(frozen=True)
class RankedPlan:
    """A plan that can be run here, and a sentence for each thing that speaks for it."""

    plan: Plan
    why: tuple[str, ...]
