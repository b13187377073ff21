"""Python: lines of the user's own that take time and are no part of the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from hotloop.core.records.profile import COUNTS, LineTime, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.code_regions import (
    LOOP,
    Spread,
    acts,
    function_of,
    is_known,
    is_view,
    loop_of,
    part_of,
    parts,
    rounds_of,
    spread,
    trains,
)
from hotloop.profiler.detectors.device_sync import brings_back
from hotloop.profiler.detectors.parameter_loops import IN_LISTS, over_parameters, reading
from hotloop.profiler.detectors.step import (
    ASIDE,
    COMPUTING,
    DEDUCED,
    IN_PYTHON,
    PLAIN,
    Step,
    draws,
    grouped,
    heaviest,
    named_function,
)

_REDUCE = "look what it is asked for at each step (callbacks, logging, checks), and leave out what isn't needed"

_WHOLE = "write it with operations on whole tensors, or do it once before the loop"

_COMPARING = frozenset({"aten::eq", "aten::ne"})
_CHOOSING = frozenset({"aten::argmax", "aten::topk", "aten::max"})
_COUNTING = frozenset({"aten::sum", "aten::mean"})
"""What the share of right answers is made of, on one line or on several."""

_CUTTING = frozenset({"aten::index", "aten::index_select"})
_NUMBERING = frozenset(
    f"aten::{name}"
    for name in ("randint", "random_", "randperm", "arange", "empty", "resize_", "reshape", "add", "scalar_tensor")
)
"""How a batch is cut out of tensors with one index, and what the index is made by."""

_COMPUTED: tuple[Phase, ...] = ("python", "batch")
"""Phases that a forward is in that is called directly."""

_TALLYING = frozenset({"aten::bincount", "aten::histc"})
"""What a confusion matrix is made by."""

_MEASURING = _COMPARING | _CHOOSING | _COUNTING | _TALLYING

_SELDOM = "compute them every hundred steps, or after an epoch; keep their sums on the device until then"

_ARRAYS = ("numpy", "scipy", "cupy", "pandas")


def aside(step: Step) -> Iterator[Remedy]:
    """What the loop does beside training: logging, pictures, work in NumPy or in plain Python."""
    small: Counter[str] = Counter()
    is_training, acting = trains(step), _acting(step)
    lines = (
        line
        for line in _users(step, step.lines(*ASIDE))
        if not (_draws(step, line) or is_training(line) or _calls_network(step, line))
        and not (function_of(line) in acting and _is_of_torch(step, line))
    )
    for ones in parts(step, lines, lambda line: line.own_ms):
        spent = sum(line.own_ms for line in ones) if is_known(step, ones) else _worked(step, ones)
        if step.share(spent) < COUNTS:
            small.update(_by_place(ones))
        hottest = max(ones, key=lambda line: line.own_ms)
        cause, remedy = _named(step, ones, hottest, spent)
        yield Remedy(
            cause=cause,
            where=hottest.where,
            remedy=remedy,
            gain=step.share(spent),
            evidence=f"{_called(hottest)} takes {spent:.2f} ms of each step of {step.ms:.2f} ms",
        )
    yield from _together(step, spread(step, small), "several small things at each step", _REDUCE)


def measuring(step: Step) -> Iterator[Remedy]:
    """Metrics between forward and backward: answers are chosen and counted at lines that no backward comes back to.

    A loss compares and counts as well, for its masks, but it seldom chooses an answer for that.
    """
    for lines in metrics(step):
        spent = sum(step.cost(one) for one in lines)
        yield Remedy(
            cause="metrics at each step, between forward and backward",
            where=heaviest(lines, step),
            remedy=f"if they only measure, {_SELDOM}",
            gain=step.share(spent),
            evidence=f"choosing and counting answers takes {spent:.2f} ms of each step of {step.ms:.2f} ms, "
            "and no backward comes back to it",
        )


def metrics(step: Step) -> Iterator[list[OperatorTime]]:
    """Of each file, what runs at lines of metrics between forward and backward."""
    used = {one.where for one in step.operators(lambda one: one.phase == "backward" or one.used is True)}
    aside = step.operators(lambda one: one.phase == "loss" and bool(one.where) and one.where not in used)
    for ones in grouped(aside, lambda one: one.where.rpartition(":")[0]).values():
        if there := where_counted(ones):
            yield [one for one in ones if one.where in there]


def where_counted(ones: Sequence[OperatorTime]) -> set[str]:
    """Lines at which answers are chosen and counted; none where it isn't counted which are right."""
    return {one.where for one in ones if one.name in _MEASURING} if counts_right(ones) else set()


def counts_right(ones: Sequence[OperatorTime]) -> bool:
    """Whether answers are chosen, and it's counted which are right, by operations on what is no float."""
    names = {one.name for one in ones}
    whole = {one.name for one in ones if not one.dtype}
    counts = bool(whole & _COUNTING) or ("aten::_to_copy" in whole and bool(names & _COUNTING))
    return bool(names & _CHOOSING) and (bool(names & _TALLYING) or (bool(names & _COMPARING) and counts))


def inside(step: Step) -> Iterator[Remedy]:
    """Plain Python within the network's forward, a loss or the update: what operators don't explain of a line's time."""
    lines, small = _plain(step), Counter[str]()
    for ones in parts(step, lines, lambda line: line.own_ms):
        plain = sum(line.own_ms for line in ones) if is_known(step, ones) else 0.0
        hottest = max(ones, key=lambda line: line.own_ms)
        if step.share(plain) < COUNTS:
            small.update(_by_place(ones))
        cause, remedy = _named_within(step, ones, hottest)
        yield Remedy(
            cause=cause,
            where=hottest.where,
            remedy=remedy,
            gain=step.share(plain),
            evidence=f"{_called(hottest)} takes {plain:.2f} ms of each step of {step.ms:.2f} ms beside torch's operations",
        )
    cause = "Python code within the network, the loss or the update"
    yield from _together(step, spread(step, small, past_torch=False), cause, _WHOLE)


def _plain(step: Step) -> list[LineTime]:
    """Lines that take over twice as long as their operators, each with what it takes beside these.

    Less says nothing: how a phase's time is divided is known from samples.
    """
    is_training = trains(step)
    beside = [line for line in step.lines(*_COMPUTED) if is_training(line)]
    lines = [line for line in [*step.lines(*COMPUTING), *beside] if line.library != "torch"]
    found = []
    for (where, phase), ones in grouped(lines, lambda line: (line.where, line.phase)).items():
        own, worked = sum(line.own_ms for line in ones), step.worked_at(where, phase)
        if own > IN_PYTHON * worked:
            found += [one.model_copy(update={"own_ms": one.own_ms * (1 - worked / own)}) for one in ones]
    return found


def _by_place(ones: Sequence[LineTime]) -> dict[str, float]:
    """Milliseconds of each line."""
    return {where: sum(one.own_ms for one in at) for where, at in grouped(ones, lambda line: line.where).items()}


def _named_within(step: Step, ones: Sequence[LineTime], hottest: LineTime) -> tuple[str, str]:
    """In words, and what to do. Between forward and backward the loop does what it likes, and the loss is a part of that."""
    if _drives(step, hottest):
        return f"{hottest.library}'s own work in each step", _REDUCE
    if hottest.phase != "loss":
        phase = hottest.phase if hottest.phase in COMPUTING else "forward"
        return f"Python code within the {phase}" + (f" ({hottest.library})" if hottest.library else ""), _WHOLE
    if waiting := _waiting(step, hottest):
        return waiting
    return _of_library(step, ones) if _library(ones) else ("Python code between forward and backward", _WHOLE)


def _together(step: Step, found: Iterable[Spread], cause: str, remedy: str) -> Iterator[Remedy]:
    for one in found:
        yield Remedy(
            cause=f"{cause}: {one.functions}",
            where=one.where,
            remedy=remedy,
            gain=step.share(one.ms),
            evidence=f"together they take {one.ms:.2f} ms of each step of {step.ms:.2f} ms, none of them much by itself",
        )


def _drives(step: Step, line: LineTime) -> bool:
    """Whether a line hands the training itself to a library, which then calls backward and update."""
    trains = {one.where for one in step.profile.lines if one.phase == "backward" and one.library == "torch"}
    return line.library not in ("", "torch", *_ARRAYS) and line.where in trains | {step.profile.step_where}


def _draws(step: Step, line: LineTime) -> bool:
    """Whether a line only cuts the batch out with one index, or makes that: without a loader no way is faster.

    What has whole numbers alone counts as an index.
    """
    there = [one for one in step.spots.get(line.where, []) if one.phase == line.phase and not is_view(one)]
    known = all(one.name in _CUTTING or (one.name in _NUMBERING and not one.dtype) for one in there)
    once = all(one.calls < LOOP and (one.line_runs or 0) < LOOP for one in there)
    return line.phase == "batch" and line.library in ("", "torch") and bool(there) and known and once


def _calls_network(step: Step, line: LineTime) -> bool:
    """Whether a line calls a network, for example to choose an action. The call is no plain Python; habits name needless calls."""
    called = {one.where for one in step.profile.lines if one.within == line.where} | {line.where}
    return any(one.module not in PLAIN for where in called for one in step.spots.get(where, []))


def _acting(step: Step) -> set[tuple[str, str]]:
    """Functions that choose an action: each call asks a network, and draws a number or reads one on the host."""
    asking = {function_of(line) for line in step.profile.lines if _calls_network(step, line)} - loop_of(step)
    chosen = step.operators(lambda one: bool(one.where) and (draws(one) or one.name == "aten::item"))
    return asking & {function_of(one) for one in chosen}


def _is_of_torch(step: Step, line: LineTime) -> bool:
    """Whether a line's time goes into torch. Each action needs this work."""
    return line.library == "torch" or line.own_ms <= IN_PYTHON * step.worked_at(line.where, line.phase)


def _users(step: Step, lines: list[LineTime]) -> Iterator[LineTime]:
    """Without the edges of what torch does: lines that call it for the training itself."""
    training = {line.where for line in step.lines(*COMPUTING) if line.library == "torch"} | {step.profile.step_where}
    return (line for line in lines if line.library != "torch" or line.where not in training)


def _named(step: Step, ones: list[LineTime], hottest: LineTime, spent: float) -> tuple[str, str]:
    """What it is that takes so many milliseconds, in words, and what to do."""
    library = _library(ones)
    if _saves(step, ones):
        return (
            f"a checkpoint is written at each step: {_called(hottest)}",
            "once in an epoch, or every some minutes",
        )
    if hottest.phase == "logging":
        with_ = f" with {library}" if library not in ("", "torch") else ""
        return (
            f"logging at each step{with_}: {_called(hottest)}",
            "do it every hundred steps, or after an epoch; keep numbers on the device until then",
        )
    if hottest.phase == "synchronisation":
        return (
            "waiting for the device at each step",
            "read numbers every hundred steps; leave out synchronize() and empty_cache()",
        )
    if waiting := _waiting(step, hottest):
        return waiting
    if _drives(step, hottest):
        return f"{hottest.library}'s own work in each step", _REDUCE
    if library in _ARRAYS and _crosses(step, ones):
        return _of_library(step, ones)
    if parameters := _over_parameters(step, hottest):
        return parameters
    if any(hottest.where in loop for loop in reading(step)):
        return "a Python loop over parameters, outside of the optimizer: they are read one by one", IN_LISTS
    if library in ("", "torch") and _is_metric(step, ones):
        return (
            f"metrics at each step: {_called(hottest)}",
            _SELDOM,
        )
    if library in ("", "torch") and _worked(step, ones) > 0.5 * spent:
        if _worked(step, ones, draws) > 0.5 * _worked(step, ones):
            return (
                "random numbers are drawn in the loop, outside of the network",
                "many small draws: with one call, or for many steps at once; what needn't be new in each step: before the loop",
            )
        return (
            "tensors made or turned over in the loop, outside of the network",
            "make what doesn't change once, before the loop; keep tensors as tensors (no lists, no .tolist())",
        )
    if library == "torch":
        return (
            f"torch's own Python is called at each step: {_called(hottest)}",
            "do it once, before the loop, or less often: optimizers, modes and lists of parameters can stay as they are",
        )
    if library:
        return _of_library(step, ones)
    return (
        f"plain Python in the loop, on numbers, lists or arrays: {_called(hottest)}",
        _WHOLE,
    )


def _saves(step: Step, ones: Sequence[LineTime]) -> bool:
    """Whether one of the lines writes a checkpoint at each step."""
    saving = {habit.where for habit in step.profile.habits if habit.what == "checkpoint"}
    return any(line.where in saving for line in ones)


def _worked(step: Step, ones: Sequence[LineTime], wanted: Callable[[OperatorTime], bool] = lambda one: True) -> float:
    """Milliseconds of the wanted ones among the operators that lines call."""
    places = {(line.where, line.phase) for line in ones}
    return sum(map(step.cost, step.operators(lambda one: (one.where, one.phase) in places and wanted(one))))


def _waiting(step: Step, line: LineTime) -> tuple[str, str] | None:
    if line.phase not in DEDUCED or step.phase("unattributed") <= step.phase(line.phase):
        return None
    return (
        f"waiting in the loop, at each step: the thread doesn't run in {_called(line)}",
        "do what it waits for less often, outside of the loop, or in another thread or process",
    )


def _of_library(step: Step, ones: Sequence[LineTime]) -> tuple[str, str]:
    """What a library other than torch does."""
    library = _library(ones)
    if library in _ARRAYS and _crosses(step, ones):
        return (
            f"a tensor moved back and forth: {library} works on it in the loop",
            "write it with torch's operations, so that it stays where it is; or do it once before the loop",
        )
    return f"{library} is called at each step", "do it less often, or outside of the loop"


def _library(ones: Sequence[LineTime]) -> str:
    """That most of the time is spent in; empty for none."""
    shares = grouped(ones, lambda line: line.library)
    return max(shares, key=lambda name: sum(line.own_ms for line in shares[name]))


def _crosses(step: Step, ones: Sequence[LineTime]) -> bool:
    """Whether a whole tensor is brought to the host in the lines' part of the script, or where their function is called.

    The line that does so takes next to nothing, so that it may be none of those that were seen.
    """
    part = part_of(step)
    own = {part(line) for line in ones}
    places = {place for line in ones for place in (line.where, line.within)} - {""}
    return brings_back(step.operators(lambda one: one.where in places or (bool(one.where) and part(one) in own)))


def _over_parameters(step: Step, line: LineTime) -> tuple[str, str] | None:
    ones = step.spots.get(line.where, [])
    return over_parameters(step, ones, rounds_of(ones))


def _is_metric(step: Step, lines: Sequence[LineTime]) -> bool:
    """Whether lines choose or compare answers, in a file that counts which are right; what makes a batch may look like it."""
    places = {line.where for line in lines}
    files = {place.rpartition(":")[0] for place in places}
    ones = step.operators(lambda one: one.phase in ASIDE and one.phase != "batch")
    there = {one.name for one in ones if one.where.rpartition(":")[0] in files}
    own = {one.name for one in ones if one.where in places}
    if acts(step, lines):
        return False
    return bool(own & (_CHOOSING | _COMPARING)) and bool(there & _COMPARING) and bool(there & _COUNTING)


def _called(line: LineTime) -> str:
    name = named_function(line.function)
    return "the line" if name == "<module>" else name
