"""Regions of code: lines that count together, and the line that calls several small costs."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from hotloop.core.records.profile import COUNTS, LineTime, OperatorTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.step import PLAIN, ProfiledStep, group_by, is_random, named_function

_TRAINING: tuple[Phase, ...] = ("forward", "backward", "update")

_MIN_SAMPLES = 3  # least number of stack samples of a line; fewer samples may be chance
_SURE_SHARE = 0.2  # share of the step above which few stack samples are enough

LineOrOperator = LineTime | OperatorTime
"""A record with a line, its function and a phase."""


def group_lines(
    step: ProfiledStep, lines: Iterable[LineTime], spent: Callable[[LineTime], float]
) -> list[list[LineTime]]:
    """Groups lines by region; a line of the loop that counts by itself is a group of its own.

    Args:
        spent: returns the milliseconds of a line that count.
    """
    lines = list(lines)
    there = group_by(lines, lambda line: line.where)
    heavy = {where for where, ones in there.items() if _is_region(step, ones, spent)}
    part = region_key(step, step.named | heavy)
    return list(group_by(lines, part).values())


def _is_region(step: ProfiledStep, ones: Sequence[LineTime], spent: Callable[[LineTime], float]) -> bool:
    """Returns whether a line counts by itself, by its samples or its operators."""
    if step.share(sum(map(spent, ones))) < COUNTS:
        return False
    worked = sum(step.operators_ms_at(*place) for place in {(one.where, one.phase) for one in ones})
    return has_enough_samples(step, ones) or step.share(worked) >= COUNTS


def has_enough_samples(step: ProfiledStep, ones: Sequence[LineTime]) -> bool:
    """Returns whether the samples suffice to estimate the time beside operators."""
    if any(line.looks is None for line in ones):
        return True
    return (
        sum(line.looks or 0 for line in ones) >= _MIN_SAMPLES
        or step.share(sum(line.own_ms for line in ones)) >= _SURE_SHARE
    )


def region_key(step: ProfiledStep, alone: Collection[str] = ()) -> Callable[[LineOrOperator], tuple[str, ...]]:
    """Returns a function from a line to its region: its function, or a part of the loop.

    A part of the loop has one phase and lies between two lines that train.

    Args:
        alone: lines of the loop that are regions of their own.
    """
    loop = loop_functions(step)
    trains = {line.where for line in step.lines(*_TRAINING) if line.library == "torch" and function_of(line) in loop}
    numbers = sorted(place_of(where)[1] for where in trains | {step.profile.step_where} if where)

    def part(one: LineOrOperator) -> tuple[str, ...]:
        function = function_of(one)
        if function not in loop:
            return function
        if one.where in alone:
            return one.where, ""
        return *function, one.phase, str(bisect(numbers, place_of(one.where)[1]))

    return part


def loop_functions(step: ProfiledStep) -> set[tuple[str, str]]:
    """Returns the functions that contain the training loop."""
    seen: list[LineOrOperator] = [*step.profile.lines, *step.profile.operators]
    return {function_of(one) for one in seen if one.where and one.where == step.profile.step_where and one.function}


def function_of(one: LineOrOperator) -> tuple[str, str]:
    """Returns the file and name of a line's function."""
    return one.where.rpartition(":")[0], named_function(one.function)


def place_of(where: str) -> tuple[str, int]:
    """Returns file and line number; 0 without a line number."""
    file, _, number = where.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def training_line_test(step: ProfiledStep) -> Callable[[LineTime], bool]:
    """Returns a test for lines that compute part of a backward graph, or are in a `forward` that does."""
    used = step.operators(lambda one: one.used is True and bool(one.where))
    lines = {one.where for one in used}
    forwards = {function_of(one) for one in used if named_function(one.function).endswith(".forward")}
    return lambda line: line.where in lines or function_of(line) in forwards


def is_action_choice(step: ProfiledStep, ones: Iterable[LineOrOperator]) -> bool:
    """Returns whether a function draws numbers or calls a network, as the choice of an action does."""
    functions = {function_of(one) for one in ones} - loop_functions(step)
    there = step.operators(lambda one: bool(one.where) and function_of(one) in functions)
    return any(is_random(one) or one.module not in PLAIN for one in there)


_MAX_NAMED = 3


class SpreadWork(NamedTuple):
    """Several small costs under one line.

    Attributes:
        ms: total milliseconds.
        functions: their functions, as text.
    """

    where: str
    ms: float
    functions: str


def find_spread_work(
    step: ProfiledStep, small: Mapping[str, float], *, past_torch: bool = True
) -> Iterator[SpreadWork]:
    """Yields the innermost lines under which small costs add up to a remedy.

    Lines that call the training itself are left out: they call everything.

    Args:
        small: milliseconds of lines below the threshold, without their callees.
        past_torch: whether callers through torch count.
    """
    lines = {line.where: line for line in sorted(step.profile.lines, key=lambda line: (line.within != "", line.ms))}
    closed = _training_callers(step, lines)
    closed |= set() if past_torch else {line.where for line in step.profile.lines if line.library == "torch"}
    sums, parts = dict(small), {where: [where] for where in small}
    for where in _order_by_depth(small, lines):
        if where not in sums:  # its costs have been reported, or its callers are left out
            continue
        if (
            len(parts[where]) > 1
            and step.share(sums[where]) >= COUNTS
            and has_enough_samples(step, [line for line in step.profile.lines if line.where in parts[where]])
        ):
            yield SpreadWork(where, sums[where], _functions(parts[where], lines, small))
        elif (outer := _innermost_line(where, lines)) and outer not in closed:
            sums[outer] = sums.get(outer, 0.0) + sums[where]
            parts[outer] = parts.get(outer, []) + parts[where]


def _innermost_line(where: str, lines: Mapping[str, LineTime]) -> str:
    return lines[where].within if where in lines else ""


def _enclosing_lines(where: str, lines: Mapping[str, LineTime]) -> list[str]:
    """Returns the callers of a line, each once, since functions may be recursive."""
    found = [where]
    while (outer := _innermost_line(found[-1], lines)) and outer not in found:
        found.append(outer)
    return found[1:]


def _training_callers(step: ProfiledStep, lines: Mapping[str, LineTime]) -> set[str]:
    trains = {line.where for line in step.profile.lines if line.phase == "backward" and line.library == "torch"}
    return {outer for where in trains | {step.profile.step_where} for outer in _enclosing_lines(where, lines)}


def _order_by_depth(small: Mapping[str, float], lines: Mapping[str, LineTime]) -> list[str]:
    """Returns the small costs and their callers, callees first."""
    depths = {
        where: len(_enclosing_lines(where, lines)) for one in small for where in [one, *_enclosing_lines(one, lines)]
    }
    return sorted(depths, key=lambda where: -depths[where])


def _functions(parts: list[str], lines: Mapping[str, LineTime], small: Mapping[str, float]) -> str:
    """Returns the names of functions, those with most time first."""
    heaviest = sorted((where for where in parts if small[where] > 0), key=lambda where: -small[where])
    names = list(dict.fromkeys(named_function(lines[where].function) for where in heaviest))
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join(names[:_MAX_NAMED] + more)


MIN_LOOP_CALLS = 8
"""Least calls of the same operator by a line, per step, for a loop."""


def runs_per_step(ones: Sequence[OperatorTime]) -> float:
    """Returns how often a line runs in a step: the count of its rarest repeated operator; 0 if it is no loop.

    Views don't count, since one layer of a library may make many. The count is at most how often Python ran the line: a
    library's own loops can't be changed by the user.
    """
    working = [one for one in ones if not is_view(one)]
    first = [one for one in working if one.phase in ("forward", "loss", "batch", "python")] or working
    if any(one.phase == "update" for one in first):
        return 0.0
    counts = [sum(one.calls for one in same) for same in group_by(first, _loop_key).values()]
    runs = max((one.line_runs for one in ones if one.line_runs is not None), default=inf)
    repeated = [count for count in counts if count >= MIN_LOOP_CALLS]
    return min(*repeated, runs) if repeated and runs >= MIN_LOOP_CALLS else 0.0


def is_view(one: OperatorTime) -> bool:
    return not (one.bytes or one.flops or one.bytes is None)


def _loop_key(one: OperatorTime) -> tuple[str, str, str]:
    """Returns a key of repeated work: a module, or equal modules on the same input, such as attention heads."""
    if one.alike >= MIN_LOOP_CALLS:
        return "", one.name, " ".join(one.shapes)
    return one.module, one.name, ""
