"""Proofs of the plans of a search, best first, while all proofs together take less than the plan saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from hotloop.core.records.race import Parity, Timing
from hotloop.errors import error_summary, is_out_of_memory
from hotloop.plan import Plan
from hotloop.tuning.search.budget import Budget


@dataclass
class Proofs:
    """The proofs of one search.

    Attributes:
        accepted: parity classes that a winner may have.
        steps: of this run; None if unknown.
        notes: why plans weren't proven.
        results: plans with their parity, in the order of their proofs.
        spent_s: seconds of failed proofs.
    """

    baseline: Plan
    budget: Budget
    accepted: Collection[str]
    prove: Callable[[Timing], Parity]
    baseline_timing: Timing
    steps: int | None
    notes: list[str] = field(default_factory=list)
    results: list[Timing] = field(default_factory=list)
    spent_s: float = 0.0

    def first(self, timings: Iterable[Timing]) -> str | None:
        """Returns the name of the first plan whose proof pays and succeeds; None without one."""
        waiting = list(timings)
        while waiting:
            timing = waiting.pop(0)
            if why := self._why_proof_fails(timing):
                self.results.append(timing.proven(Parity(plan=timing.name, parity="unproven", reason=why, states=0)))
            elif why := self._why_too_expensive(timing):
                self.notes.append(f"{timing.name} was not proven: {why}")
            else:
                began, parity = time.perf_counter(), self._prove(timing, bool(waiting))
                self.results.append(timing.proven(parity))
                if parity.parity in self.accepted:
                    return timing.name
                self.spent_s += time.perf_counter() - began
        return None

    def _why_proof_fails(self, timing: Timing) -> str:
        """Returns why a proof would fail: a plan with a part of the changes wasn't proven; empty otherwise."""
        changes = self._changes(timing)
        judged = [one for one in self.results if not one.short_of_memory]
        part = next((one for one in judged if self._changes(one).items() <= changes.items()), None)
        return "" if part is None else f"it has {part.name}, which is {part.parity}"

    def _changes(self, timing: Timing) -> dict[str, object]:
        axes = timing.as_plan.model_dump()
        return {axis: value for axis, value in axes.items() if value != getattr(self.baseline, axis)}

    def _why_too_expensive(self, timing: Timing) -> str:
        """Returns why a proof doesn't pay; empty if it pays, or if the user sets the time."""
        if not self.budget.deadline.has_time_for(self.budget.proof_s):
            return f"that takes about {self.budget.proof_s:.0f} s, and {self.budget.deadline}"
        costs_s = self.spent_s + self.budget.proof_s
        pays = self.steps is None or timing.saves_s(self.baseline_timing, self.steps) >= costs_s
        if self.budget.is_set_by_user or pays:
            return ""
        before = " with the proofs before" if self.spent_s else ""
        return f"that takes about {costs_s:.0f} s{before}, more than it wins"

    def _prove(self, timing: Timing, others: bool) -> Parity:
        """Returns the parity, `unproven` if the proof fails; leaves time for a proof of `others`."""
        deadline, proof_s = self.budget.deadline, self.budget.proof_s
        reserve_s = 1.2 * proof_s if others and deadline.left_s > 2.4 * proof_s else 0.0
        try:
            with deadline.enforce("its proof", reserve_s=reserve_s):
                return self.prove(timing)
        except Exception as error:
            reason, passing = error_summary(error)
            if is_out_of_memory(error):
                reason = f"there was no memory left for a proof ({reason})"
        return Parity(plan=timing.name, parity="unproven", reason=reason, states=0, short_of_memory=passing)
