"""What is spread over several functions, each of which counts too little: the line that they are all called from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from hotloop.diagnosing.parts import is_known
from hotloop.diagnosing.step import COUNTS, Step, named_function
from hotloop.profiles import LineTime

_NAMED = 3
"""Functions that are named."""


class Spread(NamedTuple):
    """Several small things under one line.

    Attributes:
        ms: that they take together.
        functions: that they are in, as words.
    """

    where: str
    ms: float
    functions: str


def spread(step: Step, small: Mapping[str, float], *, past_torch: bool = True) -> Iterator[Spread]:
    """Goes from small things outwards to the innermost lines under which they add up to what counts.

    A line that the training itself is called from calls everything, so that it would say nothing.

    Args:
        small: milliseconds of lines that count too little, without what they call.
        past_torch: whether lines that call them through torch are looked at.
    """
    lines = {line.where: line for line in sorted(step.profile.lines, key=lambda line: (line.within != "", line.ms))}
    closed = _around(step, lines)
    closed |= set() if past_torch else {line.where for line in step.profile.lines if line.library == "torch"}
    sums, parts = dict(small), {where: [where] for where in small}
    for where in _from_inside_out(small, lines):
        if where not in sums:  # nothing is told outwards of what is named, or of what says nothing
            continue
        if (
            len(parts[where]) > 1
            and step.share(sums[where]) >= COUNTS
            and is_known(step, _lines_at(step, parts[where]))
        ):
            yield Spread(where, sums[where], _functions(parts[where], lines, small))
        elif (outer := _within(where, lines)) and outer not in closed:
            sums[outer] = sums.get(outer, 0.0) + sums[where]
            parts[outer] = parts.get(outer, []) + parts[where]


def _lines_at(step: Step, places: Collection[str]) -> list[LineTime]:
    return [line for line in step.profile.lines if line.where in places]


def _within(where: str, lines: Mapping[str, LineTime]) -> str:
    return lines[where].within if where in lines else ""


def _outwards(where: str, lines: Mapping[str, LineTime]) -> list[str]:
    """The lines around one, each once, since functions may call themselves."""
    found = [where]
    while (outer := _within(found[-1], lines)) and outer not in found:
        found.append(outer)
    return found[1:]


def _around(step: Step, lines: Mapping[str, LineTime]) -> set[str]:
    """The lines that the training is called from."""
    trains = {line.where for line in step.profile.lines if line.phase == "backward" and line.library == "torch"}
    return {outer for where in trains | {step.profile.step_where} for outer in _outwards(where, lines)}


def _from_inside_out(small: Mapping[str, float], lines: Mapping[str, LineTime]) -> list[str]:
    """Small things and all lines around them, each after those that it calls."""
    depths = {where: len(_outwards(where, lines)) for one in small for where in [one, *_outwards(one, lines)]}
    return sorted(depths, key=lambda where: -depths[where])


def _functions(parts: list[str], lines: Mapping[str, LineTime], small: Mapping[str, float]) -> str:
    """Names of functions, those that take most first."""
    heaviest = sorted((where for where in parts if small[where] > 0), key=lambda where: -small[where])
    names = list(dict.fromkeys(named_function(lines[where].function) for where in heaviest))
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join(names[:_NAMED] + more)
