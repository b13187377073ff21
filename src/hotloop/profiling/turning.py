"""What a loop does between the things that a timeline can see, by where it stands to the line that ends a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from hotloop.profiles import Phase
from hotloop.profiling.facts import Facts
from hotloop.profiling.following import Line
from hotloop.profiling.sites import Sites

_ENOUGH = 30
"""Looks at the stack in a phase, that say more than a traced step, in which plain Python takes many times as long."""


class Turning:
    """Says the phase of lines that run between the things that are seen; it is made where a step ends.

    What stands after the line that ends a step, or after the call of a helper that it is in, belongs to the end of the
    step, and is no making of a batch where no loader says when the next step's data begin. What stands before it is no
    longer the update that an update by hand is.
    """

    def __init__(self, sites: Sites, facts: Facts) -> None:
        self._facts, self._around = facts, sites.around()

    def phase(self, phase: Phase, lines: Iterable[Line | None]) -> Phase:
        """The phase of what runs there.

        Args:
            phase: as the timeline has it.
            lines: of the user's that are on the stack, in any order.
        """
        facts = self._facts
        if not facts.anchor or not (phase == "update" if facts.by_hand else phase == "batch"):
            return phase
        after = self._after({line for line in lines if line is not None})
        if facts.by_hand and after < 0:
            return "forward" if facts.functional else "batch"
        return "python" if after > 0 and not facts.by_hand else phase

    def _after(self, lines: set[Line]) -> int:
        """How far after the line that ends a step, or after the call that leads there; the innermost function says so."""
        for file, ends, numbers in self._around:
            for where, line in lines:
                if where == file and line in numbers and line != ends:
                    return line - ends
        return 0


def shares(
    traced: Sequence[Mapping[tuple[Phase, Phase], float]],
    sampled: Mapping[tuple[Phase, Phase], float],
    looks: Mapping[Phase, int],
) -> list[tuple[Phase, Phase, float]]:
    """As `Facts.turned`: by looks at the stack where there are enough, else the median over the traced steps.

    Args:
        traced, sampled: the time of each phase of the timeline in each that the lines say.
        looks: how many there were in each phase of the timeline.
    """
    pairs = {pair for step in (*traced, sampled) for pair in step if pair[0] != pair[1]}
    found = []
    for ground, phase in pairs:
        steps = [sampled] if looks.get(ground, 0) >= _ENOUGH else traced or [sampled]
        found.append((ground, phase, median(_share(step, ground, phase) for step in steps)))
    return sorted(one for one in found if one[2])


def _share(step: Mapping[tuple[Phase, Phase], float], ground: Phase, phase: Phase) -> float:
    """Of the time in which the timeline was in a phase: what the lines say was another."""
    total = sum(took for (around, _), took in step.items() if around == ground)
    return step.get((ground, phase), 0) / total if total else 0.0


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
