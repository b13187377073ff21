"""Whether the rest of a run can win back what a candidate costs while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotloop.core.random.rng import preserve_generators
from hotloop.lowering.build import lower
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.tuning.live.spare_time import MAX_LOSS
from hotloop.tuning.search.budget import estimate_proof_s
from hotloop.tuning.search.compile_payoff import estimate_compile_gain, estimate_compile_s
from hotloop.tuning.search.step_profile import profile_step

_HOPE = 3.0
"""Assumed speedup before the step is profiled."""

LATER_GAIN = 1.1
"""Assumed speedup of a further candidate over the plan in use, once one was raced."""

EAGER_GAIN = 1.15
"""Assumed speedup of an eager candidate over the eager plan in use."""

_SHARED_CORES = 2.0
"""Factor on the seconds of compiling and proving, for imports, and since the training uses the same cache and memory."""

_RACE_S = 2.0
"""Seconds that a race costs: loading the package, and half of the windows with the slower plan."""


@dataclass(frozen=True)
class LivePayoff:
    """The saving and the cost of a candidate.

    Attributes:
        eager: the plan that needs no compiling.
        steps: left in the run.
        step_s: seconds of a step of the plan in use.
        normed: whether the step normalises over the batch, which makes a proof longer.
        has_rewrites: whether the candidate has rewrites.
        gain: expected speedup; None before an estimate.
        operations: of a step; None if unknown.
        has_pooling: whether the step has pooling that rewrites support.
        is_compiled: whether the candidate is compiled.
        idle_cores: cores without work; without any, the child gets what the training may lose.
        loss: share of the training's speed that the child costs.
        budget_s: seconds that the training may lose to the child before a saving; 0 for a share of the time that passed.
    """

    eager: Plan
    steps: int
    step_s: float
    normed: bool
    has_rewrites: bool
    gain: float | None = None
    operations: int | None = 0
    has_pooling: bool = False
    is_compiled: bool = True
    idle_cores: float = 1.0
    loss: float = MAX_LOSS
    budget_s: float = 0.0

    @property
    def work_s(self) -> float:
        """Seconds that the child takes to compile and prove the candidate if the child is never paused."""
        compile_s = estimate_compile_s(self.operations) if self.is_compiled else 0.0
        share = min(1.0, max(MAX_LOSS, self.idle_cores))
        return _SHARED_CORES * (compile_s + estimate_proof_s(self.step_s, 0.0, self.normed)) / share

    @property
    def prepare_s(self) -> float:
        """Seconds until the candidate is compiled and proven; a child is paused when it has cost its budget."""
        over_s = self.loss * self.work_s - max(self.budget_s, MAX_LOSS * self.work_s)
        return self.work_s + max(0.0, over_s) / MAX_LOSS

    @property
    def costs_s(self) -> float:
        return self.loss * self.work_s + _RACE_S

    @property
    def saves_s(self) -> float:
        left_s = self.steps * self.step_s - self.prepare_s
        return max(0.0, left_s) * (1 - 1 / (self.gain or _HOPE))

    @property
    def is_worthwhile(self) -> bool:
        return self.saves_s > self.costs_s

    def estimated(self, task: Task) -> LivePayoff:
        """Returns the payoff with the gain by a profile of some eager steps, unless it is known already."""
        if self.gain is not None:
            return self
        program = lower(task, self.eager)
        with preserve_generators():
            made = profile_step(program, rewrites=self.has_rewrites)
        gain = estimate_compile_gain(made, self.step_s)
        own_s = self.step_s if made is None or made.step_s is None else min(self.step_s, made.step_s)
        saved_s = own_s * (1 - 1 / gain)  # loading a batch takes as long as before
        whole = self.step_s / max(self.step_s - saved_s, 1e-9)
        if made is None:
            return replace(self, gain=whole, operations=None)
        return replace(self, gain=whole, operations=made.operations, has_pooling=made.has_pooling)

    def first_of(self, plans: Sequence[Plan]) -> int:
        """Returns the place of the plan to try first: rewrites of pooling need the usual layout."""
        usual = [place for place, plan in enumerate(plans) if plan.layout == BASELINE.layout]
        return usual[0] if usual and self.has_pooling else 0

    def __str__(self) -> str:
        return f"it should save {self.saves_s:,.0f} s of the {self.steps:,} steps left, and costs about {self.costs_s:.0f} s"
