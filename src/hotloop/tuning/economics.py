"""Whether a faster plan wins back what finding it costs: its gain, the work, and the rest of the run.

The constants of compilations are fitted to a dozen networks, compiled without a cache on two cores of a 2025 server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hotloop.core.processes import Deadline
from hotloop.plan import Plan
from hotloop.tuning.races.rounds import WindowSteps
from hotloop.tuning.races.statistics import ENOUGH_PAIRS, MIN_PAIRS
from hotloop.tuning.spare_time import MAX_LOSS
from hotloop.tuning.step_profile import StepProfile

_COMPILE_S = {"package": 12.5, "step": 8.5, "forward": 8.5, "none": 2.0}
"""Seconds to compile the smallest step without a cache, by the axis `compile`; `none` is a recorded graph."""

_OPERATION_COMPILE_S = 0.025
"""Seconds for each operation of the step."""

_UNKNOWN_COMPILE_S = 40.0
"""Seconds for a step whose operations are hidden, or that is unrolled over time."""

_OPERATION_TRACE_S = 0.6e-3
"""Seconds for each operation of a step that is traced again."""

_DISPATCH_S = 5e-6
"""Seconds of PyTorch's overhead for an operation with autograd: 3 to 8 us."""

_CALL_S = 2e-6
"""Part of this overhead that a compiled step on a CPU saves, outside of the measured operations."""

_STEP_CALL_S = {"package": -30e-6, "step": 0.0}
"""Seconds of a compiled step's call beyond an eager one."""

_FORWARD_SHARE = 0.4
"""Share of the saving if only the forward and backward pass are compiled."""

_FUSED_SHARE = 0.3
"""Remaining share of the time of operations that the compiler fuses."""

_LAUNCH_S = 1e-6
"""Seconds between two operations of a CUDA graph."""

_MIN_GAIN, _MAX_GAIN = 1.02, 8.0
"""Limits of the estimated speedup of a compiled step."""

_HOPED_GAIN = 3.0
"""Assumed speedup of a compiled step before the eager step is profiled."""

LATER_GAIN, EAGER_GAIN = 1.1, 1.15
"""Assumed speedups over the plan in use: of a further compiled plan, once one was raced, and of an eager plan."""

VARIANT_GAIN = 0.15
"""Share of a compiled run's time that another compiled form (not rewritten, for one thread) may save."""

_GREAT_SPEEDUP = 2.0
"""A speedup above that of most searches."""

_SHARED_CORES = 2.0
"""Factor on the seconds of a child's work, for imports, and since the training uses the same cache and memory."""

LIVE_RACE_S = 2.0
"""Seconds that a race beside the training costs: loading the package, and half of the windows with the slower plan."""

PROOF_STEPS = 250
"""Duration of a proof in steps, with comparisons, if the plan passes at once."""

PROOF_COPIES = 1000
"""Copies of the State in a proof: costly if a step uses few of many weights. Measured: 440 to 2,900 on a CPU, 13 MB."""

_BATCH_NORM_FACTOR = 2.6
"""Factor on a proof's steps for batch normalisation, where the rounding of one sample changes all.

Measured on two cores of an AMD EPYC: 390 to 710 steps for GhostNet, RegNet, ResNet and MobileNet, 80 to 240 for others.
"""

_RACING_SHARE = 0.02
"""Share of the run under the baseline for races; a race ends when the fastest plan is known."""

_MAX_FIRST_RACE_SHARE = 0.05
"""Share of the run for the first race, if long steps need more than `_RACING_SHARE`."""

_MIN_RACE_S, _MAX_RACE_S = 1.0, 60.0
"""Least and most seconds of a race with short steps. With long steps a race may take as long as a proof."""

_SMALL_S, _TIGHT_S = 1.5, 6.0
"""Seconds for races below which a search costs more than it saves; and below which unlikely plans are left out."""

_UNKNOWN_S = 30.0
"""Seconds of races for a stream, whose length is unknown."""

_WARM_UP_STEPS = 3
"""Steps of each plan before a race."""


@dataclass(frozen=True)
class Payoff:
    """What a candidate saves in the rest of a run, and what finding it costs.

    Attributes:
        steps: left in the run; None if unknown.
        step_s: seconds of a step of the plan in use.
        gain: expected speedup; None before the step is profiled.
        compile_s, proof_s, race_s: seconds of compiling, proving and racing the candidate.
        checks_s: seconds of the run's checks whether callbacks change the compiled step.
        has_pooling: whether the step has pooling that rewrites support.
        loss: share of the training's speed that a child costs while it compiles and proves; None if the training waits.
        idle_cores: cores without work; without any, the child gets what the training may lose.
        budget_s: seconds that the training may lose to the child before a saving; 0 for a share of the time that passed.
    """

    steps: int | None
    step_s: float
    gain: float | None = None
    compile_s: float = 0.0
    proof_s: float = 0.0
    race_s: float = 0.0
    checks_s: float = 0.0
    has_pooling: bool = False
    loss: float | None = None
    idle_cores: float = 1.0
    budget_s: float = 0.0

    @property
    def run_s(self) -> float:
        """Seconds of the rest of the run with the plan in use."""
        return math.inf if self.steps is None else self.steps * self.step_s

    @property
    def faster_run_s(self) -> float:
        """Seconds of the rest of the run with the candidate."""
        return self.run_s / (self.gain or _HOPED_GAIN) + self.checks_s

    @property
    def work_s(self) -> float:
        """Seconds of compiling and proving the candidate, if a child is never paused."""
        work_s = self.compile_s + self.proof_s
        return work_s if self.loss is None else _SHARED_CORES * work_s / min(1.0, max(MAX_LOSS, self.idle_cores))

    @property
    def prepare_s(self) -> float:
        """Seconds until a child has compiled and proven the candidate; the child is paused when it has cost its budget."""
        over_s = (self.loss or 0.0) * self.work_s - max(self.budget_s, MAX_LOSS * self.work_s)
        return self.work_s + max(0.0, over_s) / MAX_LOSS

    @property
    def costs_s(self) -> float:
        return (1.0 if self.loss is None else self.loss) * self.work_s + self.race_s

    @property
    def saves_s(self) -> float:
        left_s = self.run_s if self.loss is None else self.run_s - self.prepare_s
        return max(0.0, left_s) * (1 - 1 / (self.gain or _HOPED_GAIN)) - self.checks_s

    @property
    def is_worthwhile(self) -> bool:
        return self.saves_s > self.costs_s

    def with_profile(self, made: StepProfile | None) -> Payoff:
        """Returns the payoff with the gain and the compilation of a profiled eager step."""
        gain = estimate_compile_gain(made, self.step_s)
        own_s = self.step_s if made is None or made.step_s is None else min(self.step_s, made.step_s)
        saved_s = own_s * (1 - 1 / gain)  # loading a batch takes as long as before
        whole = self.step_s / max(self.step_s - saved_s, 1e-9)
        compile_s = estimate_compile_s(None if made is None else made.operations)
        return replace(self, gain=whole, compile_s=compile_s, has_pooling=made is not None and made.has_pooling)

    def __str__(self) -> str:
        return (
            f"it should save {self.saves_s:,.0f} s of the {self.steps:,} steps left, and costs about "
            f"{self.costs_s:.0f} s"
        )


def rate_candidates(
    plans: Iterable[Plan],
    made: StepProfile | None,
    step_s: float,
    steps: int | None,
    budget: Budget,
    *,
    recurrent: bool = False,
    proof_s: float = 0.0,
    checks: int = 0,
) -> dict[Plan, Payoff]:
    """Returns the payoffs of compiled plans, fastest first; if there is no time for two, the largest saving first.

    Args:
        plans: fastest first.
        made, step_s: the eager plan's step (None if unknown), and its seconds.
        recurrent: whether compilers unroll the step's layers over time.
        proof_s: of a proof that the eager plan doesn't need.
        checks: number of times that the run traces the compiled step again.
    """
    found = dict[Plan, Payoff]()
    for plan in plans:
        seen = None if recurrent and plan.compile != "none" else made
        operations = None if seen is None else seen.operations
        found[plan] = Payoff(
            steps,
            step_s,
            gain=estimate_compile_gain(seen, step_s, plan.compile, recorded=plan.graphs != "none"),
            compile_s=estimate_compile_s(operations, plan.compile),
            proof_s=proof_s,
            race_s=budget.full_race_s(),
            checks_s=checks * (operations or 0) * _OPERATION_TRACE_S,
            has_pooling=made is not None and made.has_pooling,
        )
    first = next(iter(found.values()), None)
    if first is None or budget.is_set_by_user or first.saves_s >= 2 * first.costs_s:
        return found
    return dict(sorted(found.items(), key=lambda one: one[1].costs_s - one[1].saves_s))


def estimate_compile_s(operations: int | None, way: str = "package") -> float:
    """Estimates the seconds of a compilation without a cache; a slow or busy machine takes twice as long."""
    return _UNKNOWN_COMPILE_S if operations is None else _COMPILE_S[way] + operations * _OPERATION_COMPILE_S


def estimate_compile_gain(
    made: StepProfile | None, step_s: float, way: str = "package", *, recorded: bool = False
) -> float:
    """Estimates the speedup of a compiled step; the minimum if `made` is unknown.

    Args:
        step_s: seconds of the step, if `made` has none.
        recorded: whether the step becomes a CUDA graph, which removes the host's overhead.
    """
    if made is None:
        return _MIN_GAIN
    left_s = step_s - made.operations * _DISPATCH_S
    if made.busy_s is not None and recorded:
        left_s = made.busy_s + made.operations * _LAUNCH_S
    elif made.step_s is not None and made.library_s is not None and made.other_s is not None:
        saved_s = (1 - _FUSED_SHARE) * made.other_s + made.operations * _CALL_S - _STEP_CALL_S.get(way, 0.0)
        saved_s *= _FORWARD_SHARE if way == "forward" else 1.0
        step_s, left_s = made.step_s, max(made.step_s - saved_s, made.library_s)
    return min(_MAX_GAIN, max(_MIN_GAIN, step_s / left_s if left_s > 0 else _MAX_GAIN))


def saved_steps(steps: int | None, ratio: float, beside: float) -> float:
    """Returns what a plan of speed `ratio` saves over a plan of speed `beside`, in steps of the baseline."""
    return float("inf") if steps is None else steps * (1 / beside - 1 / ratio)


def estimate_proof_s(step_s: float, copying_s: float, normed: bool = False) -> float:
    """Estimates the seconds of a proof from those of a step and of copying the State out and back."""
    return PROOF_STEPS * step_s * (_BATCH_NORM_FACTOR if normed else 1) + PROOF_COPIES * copying_s


def is_run_too_short(steps: int | None) -> bool:
    """Whether a race and a proof cost more than a plan twice as fast saves."""
    costs = PROOF_STEPS + 2 * (MIN_PAIRS + _WARM_UP_STEPS)
    return steps is not None and steps * (1 - 1 / _GREAT_SPEEDUP) < costs


@dataclass(frozen=True)
class Budget:
    """Times of one search in seconds.

    Attributes:
        run_s: of the run under the baseline; None if unknown.
        racing_s: of all races; with long steps a race may take more, unless the user sets the limit.
        least_s: of each race; 0 if the user sets the limit.
        round_s: of a race's round, for each plan as fast as the baseline.
        proof_s: of a proof, which races and compilations leave free before the deadline.
    """

    run_s: float | None
    racing_s: float
    least_s: float = _MIN_RACE_S
    round_s: float = 0.0
    proof_s: float = 0.0
    deadline: Deadline = field(default_factory=Deadline)

    @classmethod
    def of(
        cls,
        step_s: float,
        steps: int | None,
        time_limit_s: float | None,
        device: str = "cpu",
        deadline: Deadline | None = None,
        copying_s: float = 0.0,
    ) -> Budget:
        """Returns the budget from the seconds of a step and a copy of the State; a user's time limit always holds."""
        run_s = None if steps is None else steps * step_s
        round_s = WindowSteps.of(device.partition(":")[0], step_s, step_s, brief=True).round_s(step_s)
        proof_s = estimate_proof_s(step_s, copying_s)  # of an eager plan, which rounds like the baseline
        rest = (round_s, proof_s, deadline or Deadline())
        if time_limit_s is not None:
            return cls(run_s, time_limit_s, 0.0, *rest)
        most_s = max(_MAX_RACE_S, proof_s)
        return cls(run_s, _UNKNOWN_S if run_s is None else min(most_s, _RACING_SHARE * run_s), _MIN_RACE_S, *rest)

    @property
    def is_set_by_user(self) -> bool:
        return self.least_s == 0

    def after(self, ratio: float) -> Budget:
        """Returns the budget of a run that is already faster by `ratio`."""
        return replace(self, run_s=None if self.run_s is None else self.run_s / ratio, round_s=self.round_s / ratio)

    def min_race_s(self, plans: int = 1) -> float:
        """Returns the seconds of the shortest race with a result."""
        return MIN_PAIRS * (plans + 1) * self.round_s

    def full_race_s(self, plans: int = 1) -> float:
        """Returns the seconds of a race that is precise enough for a search."""
        return ENOUGH_PAIRS * (plans + 1) * self.round_s

    def race_s(self, share: float, plans: int = 1, spent_s: float = 0.0) -> float:
        """Returns the seconds for one race: a share of all, or the time of a precise race; 0 if no result is possible.

        Args:
            spent_s: seconds of earlier races, which count against a user's limit.
        """
        asked_s = max(share * self.racing_s, self.full_race_s(plans), self.least_s)
        if self.is_set_by_user:
            asked_s = min(asked_s, self.racing_s - spent_s)
        allowed = self.deadline.has_time_for(asked_s + self.proof_s)
        left_s = asked_s if allowed else self.deadline.left_s - self.proof_s
        return left_s if left_s >= self.min_race_s(plans) else 0.0

    def max_first_plans(self, wanted: int) -> int:
        """Returns how many of `wanted` plans the first race has time for."""
        if self.is_set_by_user:
            most_s, each_s = max(self.racing_s / 2, min(self.min_race_s(), self.racing_s)), self.min_race_s(0)
        else:
            most_s = math.inf if self.run_s is None else _MAX_FIRST_RACE_SHARE * self.run_s
            each_s = ENOUGH_PAIRS * self.round_s
        able = _plans_in_time(wanted, most_s, each_s)
        if self.deadline.has_time_for((able + 1) * each_s + self.proof_s):
            return able
        return _plans_in_time(able, self.deadline.left_s - self.proof_s, each_s)

    def max_starts(self, each_s: float) -> int | None:
        """Returns how many plans with such a startup are worth a try; None for all."""
        return None if self.is_set_by_user or self.run_s is None else int(_MAX_FIRST_RACE_SHARE * self.run_s / each_s)

    def forecast(self) -> str:
        """Returns the possible cost and saving of a search in one line."""
        most_s = self.deadline.left_s
        if math.isinf(most_s):
            costs = f"racing and a proof take up to about {self.racing_s + self.proof_s:.0f} s"
            costs += ", and compiling is tried where it should win more than it takes"
        else:
            costs = f"the search takes up to {most_s:.0f} s"
        if self.run_s is None:
            return (
                f"{costs}; the length of the run is unknown, and a plan {_GREAT_SPEEDUP:g} times as fast would halve it"
            )
        return (
            f"{costs}; this run takes {self.run_s:.0f} s, and a plan {_GREAT_SPEEDUP:g} times as fast, which few searches find, "
            f"would save {self.saves_s(_GREAT_SPEEDUP):.0f} s"
        )

    @property
    def is_too_small(self) -> bool:
        """Whether the run is too short for a race; False if the user sets the time."""
        return not self.is_set_by_user and self.racing_s < _SMALL_S

    @property
    def is_tight(self) -> bool:
        """Whether unlikely plans cost more than they save."""
        return not self.is_set_by_user and self.racing_s < _TIGHT_S

    def saves_s(self, ratio: float) -> float:
        """Returns the seconds that a plan of speed `ratio` saves in this run."""
        return float("inf") if self.run_s is None else self.run_s * (1 - 1 / ratio)

    def why_no_proof(self, saves_s: float, spent_s: float) -> str:
        """Returns why the proof of a plan that saves `saves_s` doesn't pay; empty if it pays, or if the user sets the time.

        Args:
            spent_s: seconds of failed proofs.
        """
        if not self.deadline.has_time_for(self.proof_s):
            return f"that takes about {self.proof_s:.0f} s, and {self.deadline}"
        if self.is_set_by_user or saves_s >= spent_s + self.proof_s:
            return ""
        before = " with the proofs before" if spent_s else ""
        return f"that takes about {spent_s + self.proof_s:.0f} s{before}, more than it wins"


def _plans_in_time(wanted: int, seconds: float, each_s: float) -> int:
    """Returns how many of `wanted` plans can race with the baseline in `seconds`."""
    return max(0, int(min(seconds / max(each_s, 1e-9), wanted + 1)) - 1)


def why_not_searched(steps: int | None, budget: Budget | None = None) -> str:
    """Returns why a search doesn't pay in a run of `steps` steps."""
    if budget is not None and budget.is_too_small:
        why = f"the whole run takes {budget.run_s:.0f} s under the baseline"
    else:
        why = f"a proof takes as long as about {PROOF_STEPS} steps, and the whole run has {steps}"
    return f"{why}, so a search for a better plan doesn't pay; with a --time-limit hotloop searches anyway"
