"""Parts of a script's own code that are told of together: functions, and stretches of the training loop."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Sequence

from hotloop.diagnosing.step import COUNTS, PLAIN, Step, draws, grouped, named_function
from hotloop.profiles import LineTime, OperatorTime, Phase

_TRAINING: tuple[Phase, ...] = ("forward", "backward", "update")

_ENOUGH = 3
"""Looks at the stack that must have found lines: one or two may have been chance."""

_SURE = 0.2
"""Share of the step that isn't chance, however few the looks are: by the clock that much went by around these lines."""

Place = LineTime | OperatorTime
"""What has a line, its function and a phase."""


def parts(step: Step, lines: Iterable[LineTime], spent: Callable[[LineTime], float]) -> list[list[LineTime]]:
    """Lines that are told of together; a line of the loop's that counts by itself stands alone.

    Args:
        spent: milliseconds that count of a line.
    """
    lines = list(lines)
    there = grouped(lines, lambda line: line.where)
    heavy = {where for where, ones in there.items() if _counts(step, ones, spent)}
    part = part_of(step, step.named | heavy)
    return list(grouped(lines, part).values())


def _counts(step: Step, ones: Sequence[LineTime], spent: Callable[[LineTime], float]) -> bool:
    """Whether a line counts by itself: by looks, or by its operators alone."""
    if step.share(sum(map(spent, ones))) < COUNTS:
        return False
    worked = sum(step.worked_at(*place) for place in {(one.where, one.phase) for one in ones})
    return is_known(step, ones) or step.share(worked) >= COUNTS


def is_known(step: Step, ones: Sequence[LineTime]) -> bool:
    """Whether so many looks found lines that they say what these take beside their operators."""
    if any(line.looks is None for line in ones):
        return True
    return sum(line.looks or 0 for line in ones) >= _ENOUGH or step.share(sum(line.own_ms for line in ones)) >= _SURE


def part_of(step: Step, alone: Collection[str] = ()) -> Callable[[Place], tuple[str, ...]]:
    """What a line is counted with: its function; of the loop's own lines those of one phase between two lines that train.

    Args:
        alone: lines of the loop's that stand by themselves.
    """
    loop = loop_of(step)
    trains = {line.where for line in step.lines(*_TRAINING) if line.library == "torch" and function_of(line) in loop}
    numbers = sorted(place_of(where)[1] for where in trains | {step.profile.step_where} if where)

    def part(one: Place) -> tuple[str, ...]:
        function = function_of(one)
        if function not in loop:
            return function
        if one.where in alone:
            return one.where, ""
        return *function, one.phase, str(bisect(numbers, place_of(one.where)[1]))

    return part


def loop_of(step: Step) -> set[tuple[str, str]]:
    """The function that the training loop is in, as far as it was seen."""
    seen: list[Place] = [*step.profile.lines, *step.profile.operators]
    return {function_of(one) for one in seen if one.where and one.where == step.profile.step_where and one.function}


def function_of(one: Place) -> tuple[str, str]:
    """The function that a line stands in, by file and name."""
    return one.where.rpartition(":")[0], named_function(one.function)


def place_of(where: str) -> tuple[str, int]:
    """File and line; 0 where there is none."""
    file, _, number = where.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def trains(step: Step) -> Callable[[LineTime], bool]:
    """Whether a line computes what a backward goes through, or stands in a `forward` that does, as of a network whose forward is
    called directly.
    """
    used = step.operators(lambda one: one.used is True and bool(one.where))
    lines = {one.where for one in used}
    forwards = {function_of(one) for one in used if named_function(one.function).endswith(".forward")}
    return lambda line: line.where in lines or function_of(line) in forwards


def acts(step: Step, ones: Iterable[Place]) -> bool:
    """Whether a function of these draws numbers or asks a network, as one that chooses an action: its result is needed."""
    functions = {function_of(one) for one in ones} - loop_of(step)
    there = step.operators(lambda one: bool(one.where) and function_of(one) in functions)
    return any(draws(one) or one.module not in PLAIN for one in there)
