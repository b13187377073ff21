"""Overhead: many small operations where few large ones would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.core.records.profile import COUNTS, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.code_regions import LOOP, function_of, is_view, rounds_of
from hotloop.profiler.detectors.parameter_loops import hooked, over_parameters, reading
from hotloop.profiler.detectors.step import (
    COMPUTING,
    IN_PYTHON,
    PLAIN,
    Step,
    draws,
    grouped,
    heaviest,
    inside,
    named_function,
)

_CHOOSING = ("aten::argmax", "aten::max", "aten::topk")

_CELLS = ("LSTMCell", "GRUCell", "RNNCell")


@dataclass(frozen=True)
class Loop:
    """What a Python loop goes over in one function, so many times in a step.

    Attributes:
        lines: operators of each line of the user's, by `file:line`.
    """

    lines: dict[str, list[OperatorTime]]
    rounds: float

    @property
    def operators(self) -> list[OperatorTime]:
        return [one for ones in self.lines.values() for one in ones]

    def won(self, step: Step) -> float:
        """Milliseconds that go if one round does the work of all: of what operators take, and of the Python between them."""
        between = 0.0 if self.is_plain(step) else max(0.0, self._aside(step) - self._worked(step))
        return (1 - 1 / self.rounds) * (sum(step.reclaimable(one) for one in self.operators) + between)

    def is_plain(self, step: Step) -> bool:
        """Whether it goes over numbers or lists first of all, between the parts of training."""
        return self._aside(step) > IN_PYTHON * self._worked(step)

    def _aside(self, step: Step) -> float:
        """Milliseconds of its lines between the parts of training, where nobody else says what calling operators takes."""
        return sum(step.aside.get(where, 0.0) for where in self.lines)

    def _worked(self, step: Step) -> float:
        return sum(step.cost(one) for one in self.operators if one.phase not in COMPUTING)


def repeated(step: Step) -> list[Loop]:
    """All lines that a Python loop goes over; those of one function that run as often are one loop's."""
    elsewhere = {use.where for use in step.profile.loaders}.union(hooked(step), *reading(step))
    found: dict[tuple[Any, ...], dict[str, list[OperatorTime]]] = {}
    for where, there in step.spots.items():
        ones = [one for one in there if one.phase != "data"]  # samples that a loader makes one by one are said of it
        rounds = rounds_of(ones) / step.evaluations
        if where and where not in elsewhere and rounds >= LOOP:
            function = named_function(ones[0].function)
            alone = not function or over_parameters(step, ones, rounds) is not None
            file = where.rpartition(":")[0]
            found.setdefault((where,) if alone else (file, function, round(rounds)), {})[where] = ones
    return [Loop(lines, min(rounds_of(ones) for ones in lines.values()) / step.evaluations) for lines in found.values()]


def in_loops(step: Step, *, plain: bool = True) -> frozenset[str]:
    """All lines of the loops that are worth a remedy, which names but one of them.

    Args:
        plain: those of loops that are plain Python first of all, too, of which more is to be said.
    """
    worth = (loop for loop in repeated(step) if step.share(loop.won(step)) >= COUNTS)
    return frozenset().union(*(loop.lines for loop in worth if plain or not loop.is_plain(step)))


def loops(step: Step) -> Iterator[Remedy]:
    """Python loops: over time steps, samples, columns, heads, and over small batches whose gradients add up."""
    where, backwards = _backwards(step)
    pieces = grouped(repeated(step), lambda loop: backwards >= LOOP and abs(loop.rounds - backwards) < 0.5)
    if True in pieces:
        yield _accumulated(step, pieces[True], where, backwards)
    acting = [loop.rounds for loop in pieces.get(False, []) if _acts(step, loop)]
    for loop in pieces.get(False, []):
        if _is_of_actions(loop, acting):
            continue
        ones, rounds, many = loop.operators, loop.rounds, len(loop.lines)
        lines = "the line runs" if many == 1 else f"{many} lines of {named_function(ones[0].function)} run"
        calls = sum(one.calls for one in ones)
        spent = sum(step.cost(one) for one in ones)
        cause, remedy = _named(step, ones, rounds)
        yield Remedy(
            cause=cause,
            where=heaviest(ones, step),
            remedy=remedy,
            gain=step.share(loop.won(step)),
            evidence=(
                f"{lines} {rounds:.0f} times in a step and start{'s' if many == 1 else ''} {calls:.0f} operations, forward and "
                f"backward, of {1e3 * spent / calls:.0f} us each: {spent:.2f} ms of {step.ms:.2f} ms"
            ),
        )


def _acts(step: Step, loop: Loop) -> bool:
    """Whether each round draws or chooses a number and reads it on the host, as an action: the next round depends on it."""
    functions = {function_of(one) for one in loop.operators}
    names = step.operators(lambda one: bool(one.where) and function_of(one) in functions)
    reads = sum(one.calls for one in names if one.name == "aten::item" and not one.outer)
    chosen = sum(one.calls for one in names if draws(one) or one.name in _CHOOSING)
    return min(reads, chosen) >= loop.rounds - 1


def _is_of_actions(loop: Loop, acting: Sequence[float]) -> bool:
    """Whether it asks a network for actions, or does what else belongs to each of them."""
    asks = any(one.module not in PLAIN or draws(one) or one.name == "aten::item" for one in loop.operators)
    return asks and any(abs(loop.rounds - rounds) <= 0.1 * rounds for rounds in acting)


def _backwards(step: Step) -> tuple[str, float]:
    """The line of the backward that runs most often in a step, and how often."""
    lines = {line.where for line in step.profile.lines if line.phase == "backward" and line.library == "torch"}
    runs = {where: max(one.line_runs or 0.0 for one in step.spots[where]) for where in lines & step.spots.keys()}
    return max(runs.items(), key=lambda one: one[1], default=("", 0.0))


def _accumulated(step: Step, pieces: Sequence[Loop], where: str, backwards: float) -> Remedy:
    """All that is gone through once for each of an update's backwards."""
    ones = [one for loop in pieces for one in loop.operators]
    calls, spent = sum(one.calls for one in ones), sum(map(step.cost, ones))
    return Remedy(
        cause=f"gradients are accumulated over {backwards:.0f} backwards for each update, each with small operations of its own",
        where=where,
        remedy="larger batches at a time, as memory allows, and fewer of them for each update: the gradient stays the same; of "
        "several losses of one batch one backward of their sum",
        gain=step.share(sum(loop.won(step) for loop in pieces)),
        evidence=f"{calls:.0f} operations of {1e3 * spent / calls:.0f} us each: {spent:.2f} ms of {step.ms:.2f} ms",
    )


def _named(step: Step, ones: Sequence[OperatorTime], rounds: float) -> tuple[str, str]:
    modules = {one.module for one in ones}
    kinds = {module.kind for module in step.profile.modules if module.name in modules}
    cells = sorted(kinds.intersection(_CELLS))
    if cells:
        whole = cells[0].removesuffix("Cell")
        return (
            f"a Python loop over time steps: {cells[0]} is called {rounds:.0f} times",
            f"give the whole sequence to nn.{whole} at once",
        )
    if parameters := over_parameters(step, ones, rounds):
        return parameters
    samples = step.profile.samples_per_step if step.profile.loaders else None  # else rows, which may be time steps
    if samples and samples >= LOOP and abs(rounds - samples) < 0.5 and not _of_whole_batches(ones, rounds, samples):
        return (
            f"a Python loop over the {samples:.0f} samples of the batch, with many tiny kernels",
            "let the operations work on the whole batch at once (batched products, or torch.func.vmap)",
        )
    return (
        f"many tiny kernels: a Python loop of {rounds:.0f} rounds (time steps, samples, columns, heads) over small operations",
        "work on all of them at once: one product for all before the loop, a batched product or a whole layer "
        "(nn.RNN, nn.LSTM) in its place",
    )


def _of_whole_batches(ones: Sequence[OperatorTime], rounds: float, samples: float) -> bool:
    """Whether what a loop repeats has the rows of all samples, as in one over as many time steps as there are samples."""
    repeated = [
        one for one in ones if one.phase != "backward" and one.shapes and 2 * one.calls >= rounds and not is_view(one)
    ]
    rows = {max(one.shapes, key=lambda shape: shape.count("x")).partition("x")[0] for one in repeated}
    return f"{samples:.0f}" in rows


_WHERE: tuple[Phase, ...] = ("forward", "loss", "backward")

_LEAST = 3
"""Passes over memory in a forward that are worth a word."""

_TORCHS_OWN = ("MultiheadAttention", "Transformer", "Dropout", "AlphaDropout", "FeatureAlphaDropout")
"""How the classes of torch's own layers begin that need as many."""

_BY_NUMBER = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "abs",
        "sign",
        "reciprocal",
        "pow",
        "square",
        "sqrt",
        "rsqrt",
        "exp",
        "exp2",
    }
    | {
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sigmoid",
        "erf",
        "erfc",
        "floor",
        "round",
    }
    | {
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "masked_fill",
        "lerp",
        "addcmul",
        "addcdiv",
        "atan",
    }
    | {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "_to_copy",
        "sum",
        "mean",
        "amax",
        "amin",
    }
    | {"sigmoid_backward", "tanh_backward"}
)

_ARRANGING = frozenset(
    {
        "copy",
        "clone",
        "cat",
        "stack",
        "constant_pad_nd",
        "slice_backward",
        "select_backward",
        "zero",
        "fill",
        "roll",
        "flip",
    }
)


def written_out(step: Step) -> Iterator[Remedy]:
    """What a function writes out in many operations; the longest of them, forward and backward, is taken to stay."""
    for chains in grouped(_chains(step), lambda chain: (function_of(chain[0]), step.kind_at(chain[0]))).values():
        ones = [one for chain in chains for one in chain]
        spent, stays = _spent(step, ones), sum(_longest(step, chain) for chain in chains)
        forward = [one for one in ones if one.phase != "backward"]
        largest = max(forward, key=step.cost)
        of = f" of {largest.shapes[0]}" if largest.shapes and largest.shapes[0] else ""
        yield Remedy(
            cause=f"{_calls(forward):.0f} operations follow one another over tensors{of}{inside(forward, step)}, each of which goes through memory by itself",
            where=heaviest(forward, step),
            remedy="an operation that does it all, where there is one (F.cross_entropy, F.gelu, F.conv2d, "
            "F.scaled_dot_product_attention, a normalisation)",
            gain=step.share(spent - stays),
            evidence=f"forward and backward they take {spent:.2f} ms of each step of {step.ms:.2f} ms; the longest take {stays:.2f} ms",
        )


def written(step: Step) -> list[OperatorTime]:
    """The operators of such chains as are named, unless it's one of them that takes most of the time."""
    found = []
    for chain in _chains(step):
        spent, stays = _spent(step, chain), _longest(step, chain)
        if step.share(spent - stays) >= COUNTS and stays <= 0.5 * spent:
            found += chain
    return found


def _chains(step: Step) -> list[list[OperatorTime]]:
    """Of each function and module, what goes through memory, if there is enough of it in the forward."""
    own = {one.name for one in step.profile.modules if one.kind.startswith(_TORCHS_OWN)}
    passing = step.operators(
        lambda one: one.phase in _WHERE and bool(one.where) and one.module not in own and _passes(step, one)
    )
    chains = grouped(passing, lambda one: (function_of(one), one.module)).values()
    return [ones for ones in chains if _calls([one for one in ones if one.phase != "backward"]) >= _LEAST]


def _passes(step: Step, one: OperatorTime) -> bool:
    """Whether it does little with each number, and has many."""
    name = one.name.removeprefix("aten::").rstrip("_")
    return name in _BY_NUMBER | _ARRANGING and step.cost(one) >= step.small_ms * one.calls


def _spent(step: Step, ones: Sequence[OperatorTime]) -> float:
    return sum(step.cost(one) for one in ones)


def _longest(step: Step, chain: Sequence[OperatorTime]) -> float:
    """Milliseconds of the longest call in the forward, and in the backward."""
    each = [(one.phase == "backward", step.cost(one) / max(one.calls, 1.0)) for one in chain]
    return sum(max((ms for of, ms in each if of is backward), default=0.0) for backward in (False, True))


def _calls(ones: Sequence[OperatorTime]) -> float:
    return sum(one.calls for one in ones)
