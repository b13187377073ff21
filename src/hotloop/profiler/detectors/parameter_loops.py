"""Loops over parameters outside of the optimizer: averages of weights, penalties, norms of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from hotloop.core.records.profile import OperatorTime, Remedy
from hotloop.profiler.detectors.code_regions import function_of, is_view, place_of, runs_per_step
from hotloop.profiler.detectors.step import COMPUTING_PHASES, ProfiledStep, count_elements, group_by, heaviest

_BUFFERS_FACTOR = 2.0  # most tensors per parameter, with the buffers of batch norms
_TOLERANCE = 0.1  # relative difference from the optimizer's number of elements, for skipped biases or frozen parameters
_MAX_PASSES = 64  # largest number of passes over all parameters in a step; each quantity and each backward needs one
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
            f"remedy can save {won:.2f} ms of each step of {step.ms:.2f} ms",
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
            evidence=f"{function_of(ones[0])[1]} takes {max(worked, own):.2f} ms of each step of {step.ms:.2f} ms, and "
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
