"""What a rule of feasibility looks at, and what it may find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hotloop.hardware import Device, Hardware
from hotloop.plan import Plan
from hotloop.records import TaskFacts


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
class Case:
    """What a rule looks at; `device` is the plan's."""

    plan: Plan
    facts: TaskFacts
    hardware: Hardware
    device: Device


Rule = Callable[[Case], Iterator[Violation]]
