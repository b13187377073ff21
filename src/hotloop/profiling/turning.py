"""What a loop does between the things that a timeline can see, by where it stands to the line that ends a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hotloop.profiles import Phase
from hotloop.profiling.facts import Facts
from hotloop.profiling.following import Line
from hotloop.profiling.sites import Sites


class Turning:
    """Says the phase of lines that run between the things that are seen.

    What stands after the line that ends a step belongs to the end of the step, and is no making of a batch where no loader
    says when the next step's data begin. What stands before it is no longer the update that an update by hand is.
    """

    def __init__(self, sites: Sites, facts: Facts) -> None:
        self._sites, self._facts = sites, facts

    def phase(self, phase: Phase, lines: Iterable[Line | None]) -> Phase:
        """The phase of what runs there.

        Args:
            phase: as the timeline has it.
            lines: of the user's that are on the stack, in any order.
        """
        facts = self._facts
        if not (phase == "update" if facts.by_hand else phase == "batch"):
            return phase
        there, numbers = self._sites.function(facts.anchor)
        ends = int(facts.anchor.rpartition(":")[2] or 0)
        for line in lines:
            if line is None or line[0] != there or line[1] not in numbers:
                continue
            if facts.by_hand and line[1] < ends:
                return "forward" if facts.functional else "batch"
            if not facts.by_hand and line[1] > ends:
                return "python"
        return phase


def turned(phases: Mapping[Phase, float], shares: Iterable[tuple[Phase, Phase, float]]) -> dict[Phase, float]:
    """Phases of a step with shares of some given to others; they add up as before.

    Args:
        shares: from which phase to which, and which part of it.
    """
    found = dict(phases)
    for source, target, share in shares:
        moved = phases.get(source, 0.0) * share
        if moved:
            found[source] -= moved
            found[target] = found.get(target, 0.0) + moved
    return found
