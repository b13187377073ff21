"""Updates of other optimizers than the one that ends a step: which steps have one, and every how many."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hotloop.profiling.facts import StepFact
from hotloop.profiling.optimizers import Optimizers
from hotloop.profiling.steps import Event


class Seldom:
    """Counts them in all steps, those that go by too, since the few that are measured may tell another number.

    Attributes:
        steps: that have ended.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._with: defaultdict[int, list[int]] = defaultdict(list)

    def saw(self, event: Event, step: StepFact, uncounted: int) -> None:
        """Another optimizer has stepped in the step that is on, after so many that aren't counted yet."""
        seen, now = self._with[event.which], self.steps + uncounted
        if not seen or seen[-1] != now:
            step.flags.append(_flag(event.which))
            seen.append(now)

    def shift(self, measured: int) -> int:
        """How many steps go by beside those that must, so that steps watched alike aren't all those with an update, or without.

        In the order of Thue and Morse, which never comes into step with a loop.
        """
        return (measured // 2).bit_count() % 2 if self._with else 0

    def records(self, optimizers: Optimizers) -> list[dict[str, Any]]:
        """Each with its flag, and every how many steps it comes."""
        known = {which: optimizers.known_as(which) for which in self._with}
        return [
            {**known[which], "flag": _flag(which), "every": (at[-1] - at[0]) / (len(at) - 1)}
            for which, at in self._with.items()
            if len(at) > 1
        ]


def _flag(which: int) -> str:
    return f"update {which}"
