"""Runs that switch between eager plans of different bits: the child proves at once, and windows are of few steps.

python -m tests.support.live_runs RUN EPOCHS [PLAN]     a real process for SIGKILL; goes on where there is a run
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hotloop
from hotloop.core.records.race import Parity
from hotloop.core.state import differing_paths
from hotloop.plan import Plan
from hotloop.training import live_search
from hotloop.training.cadence import SpanPacer
from hotloop.training.run import Run
from hotloop.tuning import auto, window_race
from hotloop.tuning.candidate_process import PreparedPlan
from hotloop.tuning.economics import Payoff
from tests.support.tasks.full_state_task import task

OTHERS: tuple[dict[str, str], ...] = ({"precision": "bf16"}, {"optimizer": "forloop"})
"""Changes to the first plan that change bits; those of the first show in each step, and no real search makes them."""


class ProvenAtOnce:
    """In place of a child process."""

    lost_s, is_paused = 0.0, False

    def __init__(self, task: Any, training: Any, eager: Plan, plans: list[Plan], *arguments: Any) -> None:
        self.plan, self.spare_time, self._polls = plans[0], self, 0

    def poll(self) -> PreparedPlan | None:
        self._polls += 1
        proof = Parity(plan=self.plan.brief(), parity="bitwise", reason="", states=1)
        return PreparedPlan(self.plan, proof, "", 0.1) if self._polls > 2 else None

    def record(self, steps: int, seconds: float) -> None:
        pass

    def end(self) -> None:
        pass


def patch_search(setattr_: Callable[[Any, str, Any], None], *, child: type | None = ProvenAtOnce) -> None:
    """Makes a search of `OTHERS`, each of which wins its race.

    Args:
        setattr_: `monkeypatch.setattr`, or `setattr` in a process of its own.
        child: in place of the real child process; None for the real one.
    """

    def candidates(options: Any, wanted: Any, history: Any, eager: Plan, say: Any) -> list[Plan]:
        return [eager.with_axes(**axes) for axes in OTHERS]

    setattr_(auto, "live_candidates", candidates)
    if child is not None:
        setattr_(live_search, "CandidateProcess", child)
    setattr_(window_race, "WINDOW_S", 0.0)
    setattr_(window_race, "_MIN_STEPS", 1)
    setattr_(window_race, "_MAX_PAIRS", 3)
    setattr_(window_race.WindowRace, "winner", property(lambda self: self.rival))
    setattr_(live_search, "_FIRST_S", 0.0)
    setattr_(live_search, "_FIRST_SPANS", 1)
    setattr_(live_search, "_LAST_S", 0.0)
    setattr_(live_search, "_LAST_RACE_S", 0.0)
    setattr_(Payoff, "is_worthwhile", property(lambda self: True))
    setattr_(SpanPacer, "steps", lambda self: 1)


def switches(path: Path) -> list[tuple[int, str, bool]]:
    """Step, plan in brief and `window` of each switch in the journal."""
    rows = [row for row in Run.open(path).journal() if row["event"] == "plan_switch"]
    return [(row["step"], Plan(**row["plan"]).brief(), row["window"]) for row in rows]


def differences(first: Path, second: Path) -> list[str]:
    """Where the last checkpoints, the best weights and the figures of two runs differ, to the last bit."""
    runs = [Run.open(path) for path in (first, second)]
    (one, _), (other, _) = [run.checkpoints.newest(lambda line: None) for run in runs]  # type: ignore[misc]
    found = list(differing_paths(one.state, other.state))
    figures = [
        [{key: value for key, value in row.items() if "second" not in key and "per_s" not in key} for row in run.epochs]
        for run in runs
    ]
    found += ["metrics"] * (figures[0] != figures[1])
    return found + ["final"] * (runs[0].final != runs[1].final)


def main() -> None:
    path, epochs = Path(sys.argv[1]), int(sys.argv[2])
    patch_search(setattr)
    plan = sys.argv[3] if len(sys.argv) > 3 else "auto"
    resumed = (path / "run.json").is_file()
    options: dict[str, Any] = {"resume": True} if resumed else {"plan": plan}
    hotloop.fit(task(epochs), run=path, progress=False, checkpoint_every="7", **options)


if __name__ == "__main__":
    main()
