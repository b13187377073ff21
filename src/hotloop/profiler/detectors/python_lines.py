"""Lines of the user's Python code that take time outside of the network's operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hotloop.core.records.profile import COUNTS, LineTime, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.code_regions import (
    FOREACH_ADVICE,
    MIN_LOOP_CALLS,
    SpreadWork,
    describe_parameter_loop,
    find_spread_work,
    function_of,
    group_lines,
    has_enough_samples,
    is_action_choice,
    is_view,
    loop_functions,
    parameter_read_loops,
    region_key,
    runs_per_step,
    training_line_test,
)
from hotloop.profiler.detectors.device_sync import is_read_on_host
from hotloop.profiler.detectors.step import (
    ASIDE_PHASES,
    COMPUTING_PHASES,
    DEDUCED_PHASES,
    PLAIN,
    PYTHON_FACTOR,
    ProfiledStep,
    group_by,
    heaviest,
    is_random,
    named_function,
)

_REDUCE_ADVICE = (
    "check the work that the script requests at each step (callbacks, logging, checks), and leave out the "
    "work that isn't needed"
)

_TENSOR_ADVICE = "use operations on whole tensors, or compute once before the loop"

_COMPARING_OPS = frozenset({"aten::eq", "aten::ne"})
_CHOOSING_OPS = frozenset({"aten::argmax", "aten::topk", "aten::max"})
_COUNTING_OPS = frozenset({"aten::sum", "aten::mean"})  # operators of an accuracy, on one line or several

_CUTTING_OPS = frozenset({"aten::index", "aten::index_select"})
_NUMBERING_OPS = frozenset(
    f"aten::{name}"
    for name in ("randint", "random_", "randperm", "arange", "empty", "resize_", "reshape", "add", "scalar_tensor")
)
"""Operators that cut a batch out of tensors with an index, and that make the index."""

_COMPUTED_PHASES: tuple[Phase, ...] = ("python", "batch")
"""Phases of a network's forward function that is called directly."""

_TALLYING_OPS = frozenset({"aten::bincount", "aten::histc"})  # operators of a confusion matrix

_METRIC_OPS = _COMPARING_OPS | _CHOOSING_OPS | _COUNTING_OPS | _TALLYING_OPS

_LESS_OFTEN_ADVICE = "compute them every hundred steps, or after an epoch; keep their sums on the device until then"

_ARRAY_LIBRARIES = ("numpy", "scipy", "cupy", "pandas")


def python_in_loop(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for the loop's work beside training: logging, plots, NumPy, plain Python."""
    small: Counter[str] = Counter()
    is_training, acting = training_line_test(step), _action_functions(step)
    lines = (
        line
        for line in _user_lines(step, step.lines(*ASIDE_PHASES))
        if not (_is_batch_indexing(step, line) or is_training(line) or _is_network_call(step, line))
        and not (function_of(line) in acting and _is_of_torch(step, line))
    )
    for ones in group_lines(step, lines, lambda line: line.own_ms):
        spent = sum(line.own_ms for line in ones) if has_enough_samples(step, ones) else _operator_ms(step, ones)
        if step.share(spent) < COUNTS:
            small.update(_ms_by_line(ones))
        hottest = max(ones, key=lambda line: line.own_ms)
        cause, remedy = _describe_lines(step, ones, hottest, spent)
        yield Remedy(
            cause=cause,
            where=hottest.where,
            remedy=remedy,
            gain=step.share(spent),
            evidence=f"{_called_name(hottest)} takes {step.part(spent)}",
        )
    yield from _merged_remedies(
        step, find_spread_work(step, small), "several small things at each step", _REDUCE_ADVICE
    )


def step_metrics(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for metrics between forward and backward, at lines without a backward.

    A loss may compare and count for its masks, but seldom chooses an answer.
    """
    for lines in metric_operators(step):
        spent = sum(step.cost_ms(one) for one in lines)
        yield Remedy(
            cause="metrics at each step, between forward and backward",
            where=heaviest(lines, step),
            remedy=f"if they only measure, {_LESS_OFTEN_ADVICE}",
            gain=step.share(spent),
            evidence=f"choosing and counting answers takes {step.part(spent)}, and no backward uses the result",
        )


def metric_operators(step: ProfiledStep) -> Iterator[list[OperatorTime]]:
    """Yields, per file, the operators at lines of metrics between forward and backward."""
    used = {one.where for one in step.operators(lambda one: one.phase == "backward" or one.used is True)}
    aside = step.operators(lambda one: one.phase == "loss" and bool(one.where) and one.where not in used)
    for ones in group_by(aside, lambda one: one.where.rpartition(":")[0]).values():
        if there := counting_lines(ones):
            yield [one for one in ones if one.where in there]


def counting_lines(ones: Sequence[OperatorTime]) -> set[str]:
    """Returns lines that choose and count answers; empty if no right answers are counted."""
    return {one.where for one in ones if one.name in _METRIC_OPS} if is_counting_answers(ones) else set()


def is_counting_answers(ones: Sequence[OperatorTime]) -> bool:
    """Returns whether predictions are chosen and correct predictions counted, by operators on integers or booleans."""
    names = {one.name for one in ones}
    whole = {one.name for one in ones if not one.dtype}
    counts = bool(whole & _COUNTING_OPS) or ("aten::_to_copy" in whole and bool(names & _COUNTING_OPS))
    return bool(names & _CHOOSING_OPS) and (bool(names & _TALLYING_OPS) or (bool(names & _COMPARING_OPS) and counts))


def python_in_forward(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for Python in forward, loss or update: the part of a line's time without operators."""
    lines, small = _plain_python_lines(step), Counter[str]()
    for ones in group_lines(step, lines, lambda line: line.own_ms):
        plain = sum(line.own_ms for line in ones) if has_enough_samples(step, ones) else 0.0
        hottest = max(ones, key=lambda line: line.own_ms)
        if step.share(plain) < COUNTS:
            small.update(_ms_by_line(ones))
        cause, remedy = _describe_within(step, ones, hottest)
        yield Remedy(
            cause=cause,
            where=hottest.where,
            remedy=remedy,
            gain=step.share(plain),
            evidence=f"{_called_name(hottest)} takes {step.part(plain)} outside of torch's operations",
        )
    cause = "Python code within the network, the loss or the update"
    yield from _merged_remedies(step, find_spread_work(step, small, past_torch=False), cause, _TENSOR_ADVICE)


def _plain_python_lines(step: ProfiledStep) -> list[LineTime]:
    """Returns lines well above their operators' time, with the rest; smaller rests are sampling errors."""
    is_training = training_line_test(step)
    beside = [line for line in step.lines(*_COMPUTED_PHASES) if is_training(line)]
    lines = [line for line in [*step.lines(*COMPUTING_PHASES), *beside] if line.library != "torch"]
    found = []
    for (where, phase), ones in group_by(lines, lambda line: (line.where, line.phase)).items():
        own, worked = sum(line.own_ms for line in ones), step.operators_ms_at(where, phase)
        if own > PYTHON_FACTOR * worked:
            found += [one.model_copy(update={"own_ms": one.own_ms * (1 - worked / own)}) for one in ones]
    return found


def _ms_by_line(ones: Sequence[LineTime]) -> dict[str, float]:
    return {where: sum(one.own_ms for one in at) for where, at in group_by(ones, lambda line: line.where).items()}


def _describe_within(step: ProfiledStep, ones: Sequence[LineTime], hottest: LineTime) -> tuple[str, str]:
    """Returns cause and advice. Between forward and backward, Python may also belong to the loop."""
    if _is_trainer_call(step, hottest):
        return f"{hottest.library}'s own work in each step", _REDUCE_ADVICE
    if hottest.phase != "loss":
        phase = hottest.phase if hottest.phase in COMPUTING_PHASES else "forward"
        return f"Python code within the {phase}" + (f" ({hottest.library})" if hottest.library else ""), _TENSOR_ADVICE
    if waiting := _describe_wait(step, hottest):
        return waiting
    return (
        _describe_library(step, ones)
        if _main_library(ones)
        else ("Python code between forward and backward", _TENSOR_ADVICE)
    )


def _merged_remedies(step: ProfiledStep, found: Iterable[SpreadWork], cause: str, remedy: str) -> Iterator[Remedy]:
    for one in found:
        yield Remedy(
            cause=f"{cause}: {one.functions}",
            where=one.where,
            remedy=remedy,
            gain=step.share(one.ms),
            evidence=f"together they take {step.part(one.ms)}, none of them much by itself",
        )


def _is_trainer_call(step: ProfiledStep, line: LineTime) -> bool:
    """Returns whether a line calls a library that runs the training."""
    trains = {one.where for one in step.profile.lines if one.phase == "backward" and one.library == "torch"}
    return line.library not in ("", "torch", *_ARRAY_LIBRARIES) and line.where in trains | {step.profile.step_where}


def _is_batch_indexing(step: ProfiledStep, line: LineTime) -> bool:
    """Returns whether a line only indexes the batch, or makes the index of integers: no faster way without a loader."""
    there = [one for one in step.operators_by_line.get(line.where, []) if one.phase == line.phase and not is_view(one)]
    known = all(one.name in _CUTTING_OPS or (one.name in _NUMBERING_OPS and not one.dtype) for one in there)
    once = all(one.calls < MIN_LOOP_CALLS and (one.line_runs or 0) < MIN_LOOP_CALLS for one in there)
    return line.phase == "batch" and line.library in ("", "torch") and bool(there) and known and once


def _is_network_call(step: ProfiledStep, line: LineTime) -> bool:
    """Returns whether a line calls a network, for example to choose an action; `habits` have needless calls."""
    called = {one.where for one in step.profile.lines if one.within == line.where} | {line.where}
    return any(one.module not in PLAIN for where in called for one in step.operators_by_line.get(where, []))


def _action_functions(step: ProfiledStep) -> set[tuple[str, str]]:
    """Returns functions that choose an action: they call a network, and draw or read a number on the host."""
    asking = {function_of(line) for line in step.profile.lines if _is_network_call(step, line)} - loop_functions(step)
    chosen = step.operators(lambda one: bool(one.where) and (is_random(one) or one.name == "aten::item"))
    return asking & {function_of(one) for one in chosen}


def _is_of_torch(step: ProfiledStep, line: LineTime) -> bool:
    """Returns whether a line's time is spent in torch, which each action needs."""
    return line.library == "torch" or line.own_ms <= PYTHON_FACTOR * step.operators_ms_at(line.where, line.phase)


def _user_lines(step: ProfiledStep, lines: list[LineTime]) -> Iterator[LineTime]:
    """Yields lines without those that call torch for the training itself."""
    training = {line.where for line in step.lines(*COMPUTING_PHASES) if line.library == "torch"} | {
        step.profile.step_where
    }
    return (line for line in lines if line.library != "torch" or line.where not in training)


def _describe_lines(step: ProfiledStep, ones: list[LineTime], hottest: LineTime, spent: float) -> tuple[str, str]:
    """Returns cause and advice."""
    library = _main_library(ones)
    if _is_saving(step, ones):
        return (
            f"a checkpoint is written at each step: {_called_name(hottest)}",
            "write a checkpoint once in an epoch, or every few minutes",
        )
    if hottest.phase == "logging":
        with_ = f" with {library}" if library not in ("", "torch") else ""
        return (
            f"logging at each step{with_}: {_called_name(hottest)}",
            "log every hundred steps, or after an epoch; leave numbers on the device until then",
        )
    if hottest.phase == "synchronisation":
        return (
            "waiting for the device at each step",
            "read numbers every hundred steps; leave out synchronize() and empty_cache()",
        )
    if waiting := _describe_wait(step, hottest):
        return waiting
    if _is_trainer_call(step, hottest):
        return f"{hottest.library}'s own work in each step", _REDUCE_ADVICE
    if library in _ARRAY_LIBRARIES and _is_moved_to_host(step, ones):
        return _describe_library(step, ones)
    if parameters := _parameter_loop(step, hottest):
        return parameters
    if any(hottest.where in loop for loop in parameter_read_loops(step)):
        return "a Python loop over parameters, outside of the optimizer: they are read one by one", FOREACH_ADVICE
    if library in ("", "torch") and _is_metric(step, ones):
        return (f"metrics at each step: {_called_name(hottest)}", _LESS_OFTEN_ADVICE)
    if library in ("", "torch") and _operator_ms(step, ones) > 0.5 * spent:
        if _operator_ms(step, ones, is_random) > 0.5 * _operator_ms(step, ones):
            return (
                "random numbers are drawn in the loop, outside of the network",
                (
                    "draw them with one call, or for many steps at once; draw numbers that may stay the same "
                    "before the loop"
                ),
            )
        return (
            "tensors made or converted in the loop, outside of the network",
            "make tensors that don't change once, before the loop; leave tensors as tensors (no lists, no .tolist())",
        )
    if library == "torch":
        return (
            f"torch's own Python is called at each step: {_called_name(hottest)}",
            (
                "call this code once, before the loop, or less often: optimizers, modes and lists of parameters "
                "don't change"
            ),
        )
    if library:
        return _describe_library(step, ones)
    return (f"plain Python in the loop, on numbers, lists or arrays: {_called_name(hottest)}", _TENSOR_ADVICE)


def _is_saving(step: ProfiledStep, ones: Sequence[LineTime]) -> bool:
    saving = {habit.where for habit in step.profile.habits if habit.what == "checkpoint"}
    return any(line.where in saving for line in ones)


def _operator_ms(
    step: ProfiledStep, ones: Sequence[LineTime], wanted: Callable[[OperatorTime], bool] = lambda one: True
) -> float:
    places = {(line.where, line.phase) for line in ones}
    return sum(map(step.cost_ms, step.operators(lambda one: (one.where, one.phase) in places and wanted(one))))


def _describe_wait(step: ProfiledStep, line: LineTime) -> tuple[str, str] | None:
    if line.phase not in DEDUCED_PHASES or step.phase("unattributed") <= step.phase(line.phase):
        return None
    return (
        f"waiting in the loop, at each step: the thread doesn't run in {_called_name(line)}",
        "move the work that it waits for out of the loop, into another thread or process, or do the work less often",
    )


def _describe_library(step: ProfiledStep, ones: Sequence[LineTime]) -> tuple[str, str]:
    library = _main_library(ones)
    if library in _ARRAY_LIBRARIES and _is_moved_to_host(step, ones):
        return (
            f"a tensor moved back and forth: {library} works on it in the loop",
            "use torch's operations, so that the tensor stays on its device; or compute once before the loop",
        )
    return f"{library} is called at each step", "call it less often, or outside of the loop"


def _main_library(ones: Sequence[LineTime]) -> str:
    """Returns the library with most of the time; empty for none."""
    shares = group_by(ones, lambda line: line.library)
    return max(shares, key=lambda name: sum(line.own_ms for line in shares[name]))


def _is_moved_to_host(step: ProfiledStep, ones: Sequence[LineTime]) -> bool:
    """Returns whether the lines' region, or a caller of it, moves a whole tensor to the host.

    The line with the move takes little time, so it may have no samples.
    """
    part = region_key(step)
    own = {part(line) for line in ones}
    places = {place for line in ones for place in (line.where, line.within)} - {""}
    return is_read_on_host(step.operators(lambda one: one.where in places or (bool(one.where) and part(one) in own)))


def _parameter_loop(step: ProfiledStep, line: LineTime) -> tuple[str, str] | None:
    ones = step.operators_by_line.get(line.where, [])
    return describe_parameter_loop(step, ones, runs_per_step(ones))


def _is_metric(step: ProfiledStep, lines: Sequence[LineTime]) -> bool:
    """Returns whether lines choose or compare predictions, in a file that counts correct predictions."""
    places = {line.where for line in lines}
    files = {place.rpartition(":")[0] for place in places}
    ones = step.operators(lambda one: one.phase in ASIDE_PHASES and one.phase != "batch")
    there = {one.name for one in ones if one.where.rpartition(":")[0] in files}
    own = {one.name for one in ones if one.where in places}
    if is_action_choice(step, lines):
        return False
    return bool(own & (_CHOOSING_OPS | _COMPARING_OPS)) and bool(there & _COMPARING_OPS) and bool(there & _COUNTING_OPS)


def _called_name(line: LineTime) -> str:
    name = named_function(line.function)
    return "the line" if name == "<module>" else name
