"""The time of a search: at most what a better plan saves in this run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hotloop.core.processes import Deadline
from hotloop.tuning.races.rounds import WindowSteps
from hotloop.tuning.races.statistics import ENOUGH_PAIRS, MIN_PAIRS

_RACING_SHARE = 0.02
"""Share of the run under the baseline for races; a race ends when the fastest plan is known."""

_MAX_FIRST_RACE_SHARE = 0.05
"""Share of the run for the first race, if long steps need more than `_RACING_SHARE`."""

_MIN_RACE_S, _MAX_RACE_S = 1.0, 60.0
"""Least and most seconds of a race with short steps. With long steps a race may take as long as a proof."""

_SMALL_S, _TIGHT_S = 1.5, 6.0
"""Seconds for races below which a search costs more than it saves; and below which unlikely plans are left out."""

_GREAT_SPEEDUP = 2.0
"""A speedup above that of most searches."""

_UNKNOWN_S = 30.0
"""Seconds of races for a stream, whose length is unknown."""

PROOF_STEPS = 250
"""Duration of a proof in steps, with comparisons, if the plan passes at once."""

PROOF_COPIES = 1000
"""Copies of the State in a proof: costly if a step uses few of many weights. Measured: 440 to 2,900 on a CPU, 13 MB."""

_BATCH_NORM_FACTOR = 2.6
"""Factor on a proof's steps for batch normalisation, where the rounding of one sample changes all.

Measured on two cores of an AMD EPYC: 390 to 710 steps for GhostNet, RegNet, ResNet and MobileNet, 80 to 240 for others.
"""

_WARM_UP_STEPS = 3
"""Steps of each plan before a race."""


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
