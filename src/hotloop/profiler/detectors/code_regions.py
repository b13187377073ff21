"""Regions of code: lines that count together, the line that calls several small costs, and loops over parameters."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

from hotloop.core.records.profile import COUNTS, LineTime, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.step import (
    COMPUTING_PHASES,
    PLAIN,
    ProfiledStep,
    count_elements,
    group_by,
    heaviest,
    is_random,
    named_function,
)

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


_BUFFERS_FACTOR = 2.0  # most tensors per parameter, with the buffers of batch norms
_TOLERANCE = 0.1  # relative difference from the optimizer's number of elements, for skipped biases or frozen parameters
_MAX_PASSES = 64  # of a step over all parameters: one for each quantity of the update and for each backward
_MIN_TENSOR_SHARE = 1 / 3  # least share of an optimizer's tensors in several passes; biases and norms may be left out
_NEIGHBOUR_LINES = 2  # largest line distance within one statement

_SELECTING = frozenset({"aten::index", "aten::index_select", "aten::masked_select", "aten::gather", "aten::take"})
"""Operators that select rows or elements, which no loop over parameters needs."""

_READ_OPS = ("aten::item", "aten::_local_scalar_dense")

_LOOP_PHASES = ("loss", "python", "batch")  # phases of the loop's own computation

_SQUARING_OPS = frozenset({"aten::pow", "aten::square", "aten::sum"})
"""Operators of a sum of squares, beside products of tensors with themselves."""

FOREACH_ADVICE = (
    "torch._foreach_ operations over the list of parameters; for code that only measures: every hundred steps"
)


def describe_parameter_loop(step: ProfiledStep, ones: Sequence[OperatorTime], rounds: float) -> tuple[str, str] | None:
    """Returns cause and advice if a line changes parameters one by one, as an average of weights does.

    The line changes tensors of several shapes in place, with about as many tensors and elements as an optimizer has.
    """
    changing = _in_place_operators(ones)
    numbers = max((_total_numbers(same) for same in group_by(changing, lambda one: one.name).values()), default=0)
    as_many = any(
        0 < tensors <= rounds <= _BUFFERS_FACTOR * tensors and numbers >= (1 - _TOLERANCE) * many
        for tensors, many in _optimizer_sizes(step)
    )
    aside = all(one.phase in ("python", "batch") for one in ones)
    if not (as_many and aside and len(_shapes(changing)) > 1):
        return None
    return (
        f"a Python loop over parameters, outside of the optimizer: {rounds:.0f} tensors are changed one by one",
        "torch._foreach_ operations over the lists of parameters; for an average of weights torch._foreach_lerp_, or "
        "torch.optim.swa_utils.AveragedModel with multi_avg_fn=get_ema_multi_avg_fn(decay)",
    )


def _optimizer_sizes(step: ProfiledStep) -> list[tuple[int, int]]:
    """Returns the tensors and elements of each optimizer, and of all together."""
    each = [use.groups for use in step.profile.optimizers]
    return [
        (sum(group.tensors for group in groups), sum(group.numbers for group in groups))
        for groups in (*each, list(chain.from_iterable(each)))
    ]


def _in_place_operators(ones: Sequence[OperatorTime]) -> list[OperatorTime]:
    """Returns operators that change a tensor in place; the target of a cast is new."""
    changing = (one for one in ones if one.name.endswith("_") and (one.bytes or one.bytes is None))
    return [
        one
        for one in changing
        if not (one.name == "aten::copy_" and one.outer.startswith(("aten::to", "aten::_to_copy")))
    ]


def _shapes(ones: Sequence[OperatorTime]) -> set[tuple[str, ...]]:
    return {tuple(one.shapes[:1]) for one in ones}


def parameter_reads(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for loops that only read parameters or gradients."""
    for lines in _adjacent_loops(step, parameter_read_loops(step)):
        ones = [one for where in lines for one in step.operators_by_line[where]]
        seldom = _are_squares(ones) or _is_only_measuring(step, lines)
        foreach = FOREACH_ADVICE, sum(_between_ms(step, where) for where in lines)  # the work itself stays
        remedy, won = _already_known(step, lines) if seldom else foreach
        tensors = max(_count_read_tensors(step, step.operators_by_line[where]) for where in lines)
        yield Remedy(
            cause=f"a Python loop over parameters, outside of the optimizer: {tensors:.0f} tensors are read one by one",
            where=heaviest(ones, step),
            remedy=remedy,
            gain=step.share(won),
            evidence=f"{sum(one.calls for one in ones):.0f} operations read as many numbers as the optimizer updates; a "
            f"remedy can save {step.part(won)}",
        )


def _adjacent_loops(step: ProfiledStep, loops: Sequence[list[str]]) -> list[list[str]]:
    """Merges loops on adjacent lines of a function, as parts of one statement."""
    found: list[list[str]] = []
    for lines in sorted(loops, key=lambda lines: place_of(lines[0])):
        file, number = place_of(lines[0])
        last = found[-1] if found else []
        beside = last and place_of(last[-1])[0] == file and number - place_of(last[-1])[1] <= _NEIGHBOUR_LINES
        if beside and function_of(step.operators_by_line[last[0]][0]) == function_of(
            step.operators_by_line[lines[0]][0]
        ):
            last += [where for where in lines if where not in last]
        else:
            found.append(list(lines))
    return found


def gradient_hooks(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for hooks on each parameter's gradient."""
    lines = group_by(step.lines("backward"), lambda line: line.where)
    for where, tensors in hook_lines(step).items():
        ones, own = step.operators_by_line[where], sum(line.own_ms for line in lines.get(where, []))
        worked = sum(step.cost_ms(one) for one in ones)
        won = max(0.0, own - worked) + sum(map(step.reclaimable_ms, ones))
        yield Remedy(
            cause=f"a hook on each parameter's gradient: {tensors:.0f} tensors are processed one by one within the "
            "backward",
            where=where,
            remedy="once after the backward, over the list of gradients: torch.nn.utils.clip_grad_value_, "
            "clip_grad_norm_ (a Task's clip_value, clip_norm), or torch._foreach_ operations; for code that "
            "only measures: every hundred steps",
            gain=step.share(won),
            evidence=f"{function_of(ones[0])[1]} takes {step.part(max(worked, own))}, and "
            "reads as many numbers as the optimizer updates",
        )


def hook_lines(step: ProfiledStep) -> dict[str, float]:
    """Returns lines of hooks, which only run in the backward, with their number of tensors."""
    found = {
        where: _count_tensors(step, [one for one in ones if one.hooked and not one.within and not is_view(one)])
        for where, ones in step.operators_by_line.items()
        if all(one.phase == "backward" for one in ones)
    }
    return {where: tensors for where, tensors in found.items() if tensors}


def _are_squares(ones: Sequence[OperatorTime]) -> bool:
    """Returns whether all work before the backward is a sum of squares."""
    working = [one for one in ones if one.phase in _LOOP_PHASES and not is_view(one) and _numbers(one) > 1]
    return all(
        one.name in _SQUARING_OPS
        or "norm" in one.name
        or (one.name == "aten::mul" and len(one.shapes) > 1 == len({*one.shapes}))
        for one in working
    )


def _is_only_measuring(step: ProfiledStep, lines: Sequence[str]) -> bool:
    """Returns whether each line reads a value of every tensor on the host, without a backward."""
    each = [step.operators_by_line[where] for where in lines]
    read = (sum(one.calls for one in ones if one.name in _READ_OPS) >= _count_read_tensors(step, ones) for ones in each)
    return all(read) and not any(one.phase == "backward" for ones in each for one in ones)


def _already_known(step: ProfiledStep, lines: Sequence[str]) -> tuple[str, float]:
    """Returns the advice, and the milliseconds of the whole loop with its backward."""
    won = sum(
        max(sum(step.cost_ms(one) for one in step.operators_by_line[where]), step.aside_ms.get(where, 0.0))
        for where in lines
    )
    return (
        "for a penalty on weights weight_decay= of the optimizer; for a norm of gradients the result of "
        f"torch.nn.utils.clip_grad_norm_, or torch.nn.utils.get_total_norm; else {FOREACH_ADVICE}",
        won,
    )


def _between_ms(step: ProfiledStep, where: str) -> float:
    """Returns the milliseconds between tensors; a CPU also computes `_foreach_` lists tensor by tensor."""
    ones = step.operators_by_line[where]
    worked = sum(step.cost_ms(one) for one in ones if one.phase not in COMPUTING_PHASES)
    called = sum(step.python_around_ms(one) if step.on_cpu else step.reclaimable_ms(one) for one in ones)
    return called + max(0.0, step.aside_ms.get(where, 0.0) - worked)


def parameter_read_loops(step: ProfiledStep) -> list[list[str]]:
    """Returns the lines of each loop that reads parameters, with lines of the function that run as often."""
    found = []
    for where, ones in step.operators_by_line.items():
        if where and _count_read_tensors(step, ones):
            rounds = runs_per_step(ones)
            same = (
                other
                for other in step.operators_by_line
                if other != where and rounds and _is_same_loop(step, where, other, rounds)
            )
            found.append([where, *same])
    return found


def _is_same_loop(step: ProfiledStep, where: str, other: str, rounds: float) -> bool:
    here, there = step.operators_by_line[where], step.operators_by_line[other]
    if function_of(here[0]) != function_of(there[0]):
        return False
    if _count_read_tensors(step, there) or abs(runs_per_step(there) - rounds) >= 1:
        return False
    return not any(_numbers(one) > 1 for one in there if not is_view(one))


def _count_read_tensors(step: ProfiledStep, ones: Sequence[OperatorTime]) -> float:
    """Returns the number of tensors that a line reads one by one, if they match an optimizer's; else 0."""
    runs = max((one.line_runs for one in ones if one.line_runs is not None), default=None)
    if (
        any(one.phase not in (*_LOOP_PHASES, "backward", "synchronisation") for one in ones)
        or len(_shapes(_in_place_operators(ones))) > 1
    ):
        return 0.0
    return _count_tensors(step, [one for one in ones if one.phase in _LOOP_PHASES and not is_view(one)], runs)


def _count_tensors(step: ProfiledStep, ones: Sequence[OperatorTime], runs: float | None = None) -> float:
    """Returns the number of tensors of several shapes that match an optimizer's; else 0. Library loops don't count."""
    for name, same in group_by(ones, lambda one: one.name).items():
        if name in _SELECTING:
            continue
        calls = sum(one.calls for one in same)
        several = len({one.shapes[0] for one in same if one.shapes}) > 1
        passes = _count_passes(step, same)
        if passes and several and (runs is None or runs >= calls / passes):
            return calls / passes
    return 0.0


def _count_passes(step: ProfiledStep, same: Sequence[OperatorTime]) -> int:
    """Returns the number of passes over the tensors of one optimizer, or of all; 0 for other tensors."""
    groups = [use.groups for use in step.profile.optimizers]
    numbers, calls = _total_numbers(same), sum(one.calls for one in same)
    for updated in (*groups, list(chain.from_iterable(groups))):
        times = numbers / (sum(group.numbers for group in updated) or 1)
        passes = min(_MAX_PASSES, max(1, round(times)))
        several = passes == 1 or (
            all(one.calls % passes == 0 for one in same)
            and calls / passes >= _MIN_TENSOR_SHARE * sum(group.tensors for group in updated)
        )
        if several and abs(times / passes - 1) <= _TOLERANCE:
            return passes
    return 0


def _total_numbers(ones: Iterable[OperatorTime]) -> float:
    return sum(one.calls * _numbers(one) for one in ones)


def _numbers(one: OperatorTime) -> int:
    """Returns the number of elements of an operator's first input."""
    return count_elements(one.shapes[0]) if one.shapes else 0
