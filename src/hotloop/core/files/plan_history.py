"""The plans of a run by step, as its journal records them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from hotloop.errors import PlanError, RunError
from hotloop.plan import Plan

EVENT = "plan_switch"
"""The journal's event of a switch. A resumed run that takes another plan replaces the later switches."""


@dataclass(frozen=True)
class PlanSwitch:
    """A plan, from a step on.

    Attributes:
        step: steps that were done before.
        number: of the switches of its run, from 0.
        is_window: whether the plan takes the steps of a short window beside the plan in use.
        is_searching: whether the run may switch to plans that its journal doesn't have.
    """

    step: int
    plan: Plan
    reason: str
    number: int = 0
    is_window: bool = False
    is_searching: bool = False

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the journal's line."""
        return {
            "step": self.step,
            "number": self.number,
            "plan": self.plan.model_dump(mode="json"),
            "reason": self.reason,
            "window": self.is_window,
            "searching": self.is_searching,
        }

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> PlanSwitch:
        return cls(
            step=int(event["step"]),
            plan=Plan(**event["plan"]),
            reason=str(event["reason"]),
            number=int(event["number"]),
            is_window=bool(event["window"]),
            is_searching=bool(event["searching"]),
        )


@dataclass
class PlanHistory:
    """The switches of one run in order of their steps; the first is of step 0. Empty for a run with one plan."""

    switches: list[PlanSwitch] = field(default_factory=list)
    written: int = 0

    @classmethod
    def from_journal(cls, events: Iterable[Mapping[str, Any]]) -> PlanHistory:
        """Reads the switches.

        Raises:
            RunError: a switch is missing or damaged.
        """
        found = cls()
        for event in events:
            if event.get("event") != EVENT:
                continue
            try:
                switch = PlanSwitch.from_event(event)
            except (KeyError, TypeError, ValueError, ValidationError, PlanError) as error:
                raise _damaged(f"plan switch {found.written} is damaged") from error
            if switch.number != found.written or (found.written == 0 and switch.step):
                raise _damaged(f"plan switch {found.written} is missing")
            found.add(switch)
        return found

    def __bool__(self) -> bool:
        return bool(self.switches)

    def next_switch(self, step: int, plan: Plan, reason: str, **fields: bool) -> PlanSwitch:
        """Returns the switch to write next; `add` it after it is in the journal."""
        return PlanSwitch(step, plan, reason, number=self.written, **fields)

    def add(self, switch: PlanSwitch) -> None:
        """Adds a switch, which replaces those of its own and of later steps."""
        self.switches = [*(one for one in self.switches if one.step < switch.step), switch]
        self.written = switch.number + 1

    def at(self, step: int) -> PlanSwitch:
        """Returns the switch whose plan takes the step after `step` steps."""
        return next(one for one in reversed(self.switches) if one.step <= step or one is self.switches[0])

    def next_step(self, step: int) -> int | None:
        """Returns the step of the first switch after `step`; None without one."""
        return next((one.step for one in self.switches if one.step > step), None)

    @property
    def last(self) -> PlanSwitch:
        return self.switches[-1]

    @property
    def plan_in_use(self) -> Plan:
        """The last plan that isn't of a window."""
        return next(one.plan for one in reversed(self.switches) if not one.is_window)

    def without_search(self) -> list[PlanSwitch]:
        """Returns the switches for the journal of a run that repeats this one."""
        return [replace(one, number=number, is_searching=False) for number, one in enumerate(self.switches)]


def _damaged(given: str) -> RunError:
    return RunError(
        f"the run's journal.jsonl is damaged: {given}",
        expected="each switch of the plan, as hotloop wrote it",
        fix="restore the file from a copy",
    )
