"""What looking for a plan may cost: no more than what a better plan can win back in this run."""

from __future__ import annotations

from dataclasses import dataclass, replace

_SHARE = 0.02
"""Of the run under the baseline, for racing; a race ends once the fastest is known."""

_LEAST_S, _MOST_S = 1.5, 60.0
"""A race tells nothing below the first, and knows all that it will know by the second."""

_GREAT = 2.0
"""Times as fast as the baseline: more than a search usually finds."""

_UNKNOWN_S = 30.0
"""For a stream, whose run is of unknown length."""

COLD_COMPILE_S = 30.0
"""A compilation with nothing kept from an earlier one; it takes 10 to 40 s on processors of today."""

REALISED = 0.7
"""Of what compiling could win, so that it's rarely tried in vain."""


@dataclass(frozen=True)
class Budget:
    """Of one search.

    Attributes:
        run_s: of the run under the baseline; None if unknown.
        racing_s: for all races together.
        least_s: for each of them, lest it be in vain; 0 where the user sets the limit.
    """

    run_s: float | None
    racing_s: float
    least_s: float = _LEAST_S

    @classmethod
    def of(cls, step_s: float, steps: int | None, time_limit_s: float | None) -> Budget:
        """From what a step takes; a time limit that the user gives is kept to, however short the run is."""
        run_s = None if steps is None else steps * step_s
        if time_limit_s is not None:
            return cls(run_s, time_limit_s, 0.0)
        return cls(run_s, _UNKNOWN_S if run_s is None else min(_MOST_S, _SHARE * run_s))

    def after(self, ratio: float) -> Budget:
        """Of a run that is so many times as fast already."""
        return replace(self, run_s=None if self.run_s is None else self.run_s / ratio)

    def race_s(self, share: float) -> float:
        """For one race, which has a share of all."""
        return max(share * self.racing_s, self.least_s)

    @property
    def too_small(self) -> bool:
        """Whether the run is over before a race could tell anything; not where the user gives the time."""
        return self.least_s > 0 and self.racing_s < _LEAST_S

    def hopeless(self, proof_s: float) -> bool:
        """Whether a proof costs more than even a plan twice as fast wins; not where the user gives the time."""
        return self.run_s is not None and self.least_s > 0 and self.wins_s(_GREAT) < proof_s

    def wins_s(self, ratio: float) -> float:
        """Seconds that a plan so many times as fast as the baseline saves in this run."""
        return float("inf") if self.run_s is None else self.run_s * (1 - 1 / ratio)
