"""What looking for a plan may cost: no more than what a better plan can win back in this run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hotloop.core.processes.deadline import Deadline
from hotloop.tuning.races.rounds import WindowSteps
from hotloop.tuning.races.statistics import ENOUGH_PAIRS, MIN_PAIRS

_RACING_SHARE = 0.02
"""Of the run under the baseline, for racing; a race ends once the fastest is known."""

_MAX_FIRST_RACE_SHARE = 0.05
"""Of the run, for the first race, where long steps make it need more than that."""

_MIN_RACE_S, _MAX_RACE_S = 1.0, 60.0
"""A race tells nothing below the first; where steps are short, it knows all that it will know by the second. Where they are long,
it may take as long as the proof of what it finds."""

_SMALL_S, _TIGHT_S = 1.5, 6.0
"""With less than the first for racing, a search costs more than it wins; with less than the second, plans stay out that are
seldom ahead of another one."""

_GREAT_SPEEDUP = 2.0
"""Times as fast as the baseline: more than a search usually finds."""

_UNKNOWN_S = 30.0
"""For a stream, whose run is of unknown length."""

PROOF_STEPS = 250
"""Steps whose time a proof takes, comparisons included, if a plan passes beside the plain baseline at once."""

PROOF_COPIES = 1000
"""Times that a proof takes to copy the State out and back, beside its steps: much where a step touches few of many weights.

440 to 2,900, as measured on a CPU with 13 MB of weights; next to nothing of a small network's proof.
"""

_BATCH_NORM_FACTOR = 2.6
"""Times as many where a compiled step normalises over the batch: what rounding does to one sample changes all, and it switches a
ReLU at most states, so that a proof begins with more baselines and looks closer more often.

390 to 710 steps for GhostNet, RegNet, ResNet and MobileNet; 80 to 240 for others, convolutional ones among them, on two cores of an
AMD EPYC.
"""

_WARM_UP_STEPS = 3
"""Of each plan, before a race."""


def saved_steps(steps: int | None, ratio: float, beside: float) -> float:
    """How many of the baseline's steps take as long as what a plan saves in a run of so many, beside another plan.

    Args:
        ratio, beside: how many times as fast as the baseline they are.
    """
    return float("inf") if steps is None else steps * (1 / beside - 1 / ratio)


def estimate_proof_s(step_s: float, copying_s: float, normed: bool = False) -> float:
    """Seconds of a proof, where a step takes so long, and to copy the State out and back."""
    return PROOF_STEPS * step_s * (_BATCH_NORM_FACTOR if normed else 1) + PROOF_COPIES * copying_s


def is_run_too_short(steps: int | None) -> bool:
    """Whether a run is so short that one race and a proof cost more than even a plan twice as fast wins."""
    costs = PROOF_STEPS + 2 * (MIN_PAIRS + _WARM_UP_STEPS)
    return steps is not None and steps * (1 - 1 / _GREAT_SPEEDUP) < costs


@dataclass(frozen=True)
class Budget:
    """Of one search.

    Attributes:
        run_s: of the run under the baseline; None if unknown.
        racing_s: for all races together; with long steps a race may take more, unless the user set it.
        least_s: for each of them, lest it be in vain; 0 where the user sets the limit.
        round_s: of a round of a race, for each plan in it that is as fast as the baseline.
        proof_s: of a proof, for which races and compilations leave time before the deadline.
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
        """From what a step and a copy of the State take; a time limit of the user's is kept to, however short the run is."""
        run_s = None if steps is None else steps * step_s
        round_s = WindowSteps.of(device.partition(":")[0], step_s, step_s, brief=True).round_s(step_s)
        proof_s = estimate_proof_s(step_s, copying_s)  # of an eager plan, which rounds as the baseline does
        rest = (round_s, proof_s, deadline or Deadline())
        if time_limit_s is not None:
            return cls(run_s, time_limit_s, 0.0, *rest)
        most_s = max(_MAX_RACE_S, proof_s)
        return cls(run_s, _UNKNOWN_S if run_s is None else min(most_s, _RACING_SHARE * run_s), _MIN_RACE_S, *rest)

    @property
    def is_set_by_user(self) -> bool:
        return self.least_s == 0

    def after(self, ratio: float) -> Budget:
        """Of a run that is so many times as fast already."""
        return replace(self, run_s=None if self.run_s is None else self.run_s / ratio, round_s=self.round_s / ratio)

    def min_race_s(self, plans: int = 1) -> float:
        """Seconds of the least race of so many plans and the baseline that tells anything."""
        return MIN_PAIRS * (plans + 1) * self.round_s

    def full_race_s(self, plans: int = 1) -> float:
        """Seconds of a race of so many plans and the baseline after which as much is known as a search asks for."""
        return ENOUGH_PAIRS * (plans + 1) * self.round_s

    def race_s(self, share: float, plans: int = 1, spent_s: float = 0.0) -> float:
        """For one race of so many plans and the baseline, which has a share of all, or what it takes to tell anything.

        Args:
            spent_s: on races before; of a limit that the user set, 0 is left where the rest tells nothing.
        """
        asked_s = max(share * self.racing_s, self.full_race_s(plans), self.least_s)
        if self.is_set_by_user:
            asked_s = min(asked_s, self.racing_s - spent_s)
        allowed = self.deadline.has_time_for(asked_s + self.proof_s)
        left_s = asked_s if allowed else self.deadline.left_s - self.proof_s
        return left_s if left_s >= self.min_race_s(plans) else 0.0

    def max_first_plans(self, wanted: int) -> int:
        """Of so many plans, how many the first race has time for."""
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
        """How many plans that take so long to start are worth a try; None for all of them."""
        return None if self.is_set_by_user or self.run_s is None else int(_MAX_FIRST_RACE_SHARE * self.run_s / each_s)

    def forecast(self) -> str:
        """What a search may cost and save, in one line."""
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
        saves = f"{self.saves_s(_GREAT_SPEEDUP):.0f} s of the {self.run_s:.0f} s that this run takes"
        return f"{costs}; a plan {_GREAT_SPEEDUP:g} times as fast, more than most searches find, would save {saves}"

    @property
    def is_too_small(self) -> bool:
        """Whether the run is over before a race could tell anything; not where the user gives the time."""
        return not self.is_set_by_user and self.racing_s < _SMALL_S

    @property
    def is_tight(self) -> bool:
        """Whether what is unlikely to win costs more than it is worth."""
        return not self.is_set_by_user and self.racing_s < _TIGHT_S

    def saves_s(self, ratio: float) -> float:
        """Seconds that a plan so many times as fast as the baseline saves in this run."""
        return float("inf") if self.run_s is None else self.run_s * (1 - 1 / ratio)


def _plans_in_time(wanted: int, seconds: float, each_s: float) -> int:
    """Of so many plans, how many can race beside the baseline in so many seconds."""
    return max(0, int(min(seconds / max(each_s, 1e-9), wanted + 1)) - 1)


def why_not_searched(steps: int | None, budget: Budget | None = None) -> str:
    """Why looking for a better plan doesn't pay in a run of so many steps."""
    if budget is not None and budget.is_too_small:
        why = f"the whole run takes {budget.run_s:.0f} s under the baseline"
    else:
        why = f"a proof takes as long as about {PROOF_STEPS} steps, and the whole run has {steps}"
    return f"{why}, so looking for a better plan doesn't pay; a --time-limit looks for one all the same"
