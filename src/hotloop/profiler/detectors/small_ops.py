"""Many small operations: Python loops, chains of elementwise operations, and compiling, which a measurement must support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hotloop.core.records.profile import COUNTS, OperatorTime, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.code_regions import (
    MIN_LOOP_CALLS,
    describe_parameter_loop,
    function_of,
    hook_lines,
    is_view,
    parameter_read_loops,
    runs_per_step,
)
from hotloop.profiler.detectors.step import (
    COMPUTING_PHASES,
    PLAIN,
    PYTHON_FACTOR,
    ProfiledStep,
    group_by,
    heaviest,
    is_product,
    is_random,
    module_text,
    named_function,
    percent,
)

_CHOOSING_OPS = ("aten::argmax", "aten::max", "aten::topk")

_RECURRENT_CELLS = ("LSTMCell", "GRUCell", "RNNCell")


@dataclass(frozen=True)
class Loop:
    """A Python loop in one function.

    Attributes:
        lines: operators of each of the user's lines, by `file:line`.
        rounds: iterations per step.
    """

    lines: dict[str, list[OperatorTime]]
    rounds: float

    @property
    def operators(self) -> list[OperatorTime]:
        return [one for ones in self.lines.values() for one in ones]

    def saved_ms(self, step: ProfiledStep) -> float:
        """Returns the milliseconds saved if one iteration does all work, including the Python between operators."""
        between = 0.0 if self.is_plain(step) else max(0.0, self._python_ms(step) - self._operators_ms(step))
        return (1 - 1 / self.rounds) * (sum(step.reclaimable_ms(one) for one in self.operators) + between)

    def is_plain(self, step: ProfiledStep) -> bool:
        """Returns whether Python takes most of the loop's time between the parts of training."""
        return self._python_ms(step) > PYTHON_FACTOR * self._operators_ms(step)

    def _python_ms(self, step: ProfiledStep) -> float:
        """Returns the milliseconds of its lines between the parts of training."""
        return sum(step.aside_ms.get(where, 0.0) for where in self.lines)

    def _operators_ms(self, step: ProfiledStep) -> float:
        return sum(step.cost_ms(one) for one in self.operators if one.phase not in COMPUTING_PHASES)


def find_loops(step: ProfiledStep) -> list[Loop]:
    """Returns all loops. Lines of one function with equal counts are one loop."""
    elsewhere = {use.where for use in step.profile.loaders}.union(hook_lines(step), *parameter_read_loops(step))
    found: dict[tuple[Any, ...], dict[str, list[OperatorTime]]] = {}
    for where, there in step.operators_by_line.items():
        ones = [one for one in there if one.phase != "data"]  # a loader's samples are a remedy of the loader
        rounds = runs_per_step(ones) / step.evaluations
        if where and where not in elsewhere and rounds >= MIN_LOOP_CALLS:
            function = named_function(ones[0].function)
            alone = not function or describe_parameter_loop(step, ones, rounds) is not None
            file = where.rpartition(":")[0]
            found.setdefault((where,) if alone else (file, function, round(rounds)), {})[where] = ones
    return [
        Loop(lines, min(runs_per_step(ones) for ones in lines.values()) / step.evaluations) for lines in found.values()
    ]


def lines_in_loops(step: ProfiledStep, *, plain: bool = True) -> frozenset[str]:
    """Returns all lines of loops with a remedy; the remedy names a line of the loop.

    Args:
        plain: whether lines of plain Python loops are included.
    """
    worth = (loop for loop in find_loops(step) if step.share(loop.saved_ms(step)) >= COUNTS)
    return frozenset().union(*(loop.lines for loop in worth if plain or not loop.is_plain(step)))


def python_loops(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for loops over time steps, samples, columns or heads, and for gradient accumulation."""
    where, backwards = _most_frequent_backward(step)
    pieces = group_by(find_loops(step), lambda loop: backwards >= MIN_LOOP_CALLS and abs(loop.rounds - backwards) < 0.5)
    if True in pieces:
        yield _accumulation_remedy(step, pieces[True], where, backwards)
    acting = [loop.rounds for loop in pieces.get(False, []) if _is_action_loop(step, loop)]
    for loop in pieces.get(False, []):
        if _is_in_action_loop(loop, acting):
            continue
        ones, rounds, many = loop.operators, loop.rounds, len(loop.lines)
        lines = "the line runs" if many == 1 else f"{many} lines of {named_function(ones[0].function)} run"
        calls = sum(one.calls for one in ones)
        spent = sum(step.cost_ms(one) for one in ones)
        cause, remedy = _describe_loop(step, ones, rounds)
        yield Remedy(
            cause=cause,
            where=heaviest(ones, step),
            remedy=remedy,
            gain=step.share(loop.saved_ms(step)),
            evidence=(
                f"{lines} {rounds:.0f} times in a step and start{'s' if many == 1 else ''} {calls:.0f} operations, forward and "
                f"backward, of {1e3 * spent / calls:.0f} us each: {spent:.2f} ms of {step.ms:.2f} ms"
            ),
        )


def _is_action_loop(step: ProfiledStep, loop: Loop) -> bool:
    """Returns whether each iteration chooses a number and reads it on the host, as an action does."""
    functions = {function_of(one) for one in loop.operators}
    names = step.operators(lambda one: bool(one.where) and function_of(one) in functions)
    reads = sum(one.calls for one in names if one.name == "aten::item" and not one.outer)
    chosen = sum(one.calls for one in names if is_random(one) or one.name in _CHOOSING_OPS)
    return min(reads, chosen) >= loop.rounds - 1


def _is_in_action_loop(loop: Loop, acting: Sequence[float]) -> bool:
    """Returns whether a loop calls a network for actions, or runs work that belongs to each action."""
    asks = any(one.module not in PLAIN or is_random(one) or one.name == "aten::item" for one in loop.operators)
    return asks and any(abs(loop.rounds - rounds) <= 0.1 * rounds for rounds in acting)


def _most_frequent_backward(step: ProfiledStep) -> tuple[str, float]:
    """Returns the line of the most frequent backward, and its count per step."""
    lines = {line.where for line in step.profile.lines if line.phase == "backward" and line.library == "torch"}
    runs = {
        where: max(one.line_runs or 0.0 for one in step.operators_by_line[where])
        for where in lines & step.operators_by_line.keys()
    }
    return max(runs.items(), key=lambda one: one[1], default=("", 0.0))


def _accumulation_remedy(step: ProfiledStep, pieces: Sequence[Loop], where: str, backwards: float) -> Remedy:
    ones = [one for loop in pieces for one in loop.operators]
    calls, spent = sum(one.calls for one in ones), sum(map(step.cost_ms, ones))
    return Remedy(
        cause=f"gradients are accumulated over {backwards:.0f} backwards for each update, each with small operations of its own",
        where=where,
        remedy="larger batches at a time, as memory allows, and fewer of them for each update: the gradient stays the same; of "
        "several losses of one batch one backward of their sum",
        gain=step.share(sum(loop.saved_ms(step) for loop in pieces)),
        evidence=f"{calls:.0f} operations of {1e3 * spent / calls:.0f} us each: {spent:.2f} ms of {step.ms:.2f} ms",
    )


def _describe_loop(step: ProfiledStep, ones: Sequence[OperatorTime], rounds: float) -> tuple[str, str]:
    modules = {one.module for one in ones}
    kinds = {module.kind for module in step.profile.modules if module.name in modules}
    cells = sorted(kinds.intersection(_RECURRENT_CELLS))
    if cells:
        whole = cells[0].removesuffix("Cell")
        return (
            f"a Python loop over time steps: {cells[0]} is called {rounds:.0f} times",
            f"give the whole sequence to nn.{whole} at once",
        )
    if parameters := describe_parameter_loop(step, ones, rounds):
        return parameters
    samples = (
        step.profile.samples_per_step if step.profile.loaders else None
    )  # without a loader, these are rows, which may be time steps
    if (
        samples
        and samples >= MIN_LOOP_CALLS
        and abs(rounds - samples) < 0.5
        and not _is_whole_batch(ones, rounds, samples)
    ):
        return (
            f"a Python loop over the {samples:.0f} samples of the batch, with many tiny kernels",
            "use operations on the whole batch at once (batched products, or torch.func.vmap)",
        )
    return (
        f"many tiny kernels: a Python loop of {rounds:.0f} rounds (time steps, samples, columns, heads) over small operations",
        "compute all rounds at once: one product for all before the loop, a batched product or a whole layer "
        "(nn.RNN, nn.LSTM) in place of the loop",
    )


def _is_whole_batch(ones: Sequence[OperatorTime], rounds: float, samples: float) -> bool:
    """Returns whether repeated operators have the rows of all samples, as in a loop over time steps."""
    repeated = [
        one for one in ones if one.phase != "backward" and one.shapes and 2 * one.calls >= rounds and not is_view(one)
    ]
    rows = {max(one.shapes, key=lambda shape: shape.count("x")).partition("x")[0] for one in repeated}
    return f"{samples:.0f}" in rows


_CHAIN_PHASES: tuple[Phase, ...] = ("forward", "loss", "backward")

_MIN_PASSES = 3  # least memory passes of a chain in the forward

_TORCH_LAYERS = ("MultiheadAttention", "Transformer", "Dropout", "AlphaDropout", "FeatureAlphaDropout")
"""Class name prefixes of torch's layers that need as many passes."""

_ELEMENTWISE_NAMES = (
    "add sub rsub mul div neg abs sign reciprocal pow square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan tanh"
    " sigmoid erf erfc floor round clamp clamp_min clamp_max maximum minimum where masked_fill lerp addcmul addcdiv atan eq"
    " ne lt le gt ge logical_and logical_or logical_not _to_copy sum mean amax amin sigmoid_backward tanh_backward"
)
_ARRANGING_NAMES = "copy clone cat stack constant_pad_nd slice_backward select_backward zero fill roll flip"
_MEMORY_PASS_OPS = frozenset(f"{_ELEMENTWISE_NAMES} {_ARRANGING_NAMES}".split())


def unfused_chain(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for functions of many elementwise operations; the longest call stays."""
    for chains in group_by(_chains(step), lambda chain: (function_of(chain[0]), step.kind_at(chain[0]))).values():
        ones = [one for chain in chains for one in chain]
        spent, stays = _chain_ms(step, ones), sum(_longest_call_ms(step, chain) for chain in chains)
        forward = [one for one in ones if one.phase != "backward"]
        race = step.profile.compiled
        if (single := _single_operation(chains)) is None and race is not None and race.ratio and not race.is_faster:
            continue  # neither torch nor its compiler has a faster form
        largest = max(forward, key=step.cost_ms)
        of = f" of {largest.shapes[0]}" if largest.shapes and largest.shapes[0] else ""
        yield Remedy(
            cause=f"{_count_calls(forward):.0f} operations follow one another over "
            f"tensors{of}{module_text(forward, step)}, each of which reads and writes memory on its own",
            where=heaviest(forward, step),
            remedy=single or _compile_advice(step, function_of(chains[0][0])[1]),
            gain=step.share(spent - stays),
            evidence=f"forward and backward they take {step.part(spent)}; the longest take "
            f"{stays:.2f} ms" + ("" if single else _compile_evidence(step)),
            axes={} if single or step.profile.compiled is not None else {"compile": "step"},
        )


_MOST_IN_ONE = 25
"""Memory passes in the forward beyond which no single operation of torch has written out a chain."""

_SINGLE_OPERATIONS: tuple[tuple[str, Sequence[set[str]]], ...] = (
    ("F.scaled_dot_product_attention, F.softmax or F.cross_entropy", ({"exp"}, {"sum", "amax"})),
    (
        "a normalisation (F.layer_norm, F.batch_norm)",
        ({"mean", "sum"}, {"sqrt", "rsqrt", "pow"}, {"sub", "mul", "div"}),
    ),
    ("F.gelu", ({"tanh", "erf"}, {"mul"})),
    ("F.silu", ({"sigmoid"}, {"mul"})),
    ("F.softplus or F.logsigmoid", ({"exp"}, {"log", "log1p"})),
    (
        "F.conv2d or F.unfold",
        ({"cat", "stack", "copy", "constant_pad_nd"}, {"constant_pad_nd", "slice_backward", "fill"}),
    ),
    ("F.mse_loss, F.huber_loss or F.smooth_l1_loss", ({"sub"}, {"pow", "square", "abs"}, {"mean", "sum"})),
    ("F.binary_cross_entropy_with_logits", ({"log"}, {"mul"}, {"mean", "sum"})),
)
"""Operations of torch, and what a chain that writes one out has: a name of each set."""


def _single_operation(chains: Sequence[Sequence[OperatorTime]]) -> str | None:
    """Returns the advice to take one operation of torch; None where torch has none for these chains."""
    for chain in chains:
        forward = [one for one in chain if one.phase != "backward"]
        names = {one.name.removeprefix("aten::").rstrip("_") for one in chain}
        known = [name for name, parts in _SINGLE_OPERATIONS if all(part & names for part in parts)]
        if _count_calls(forward) > _MOST_IN_ONE or not known:
            return None
    return f"one operation for the whole chain, where torch has one: {known[0]}"


def _compile_advice(step: ProfiledStep, function: str) -> str:
    """Returns the advice to let torch's compiler join operations that torch has no single one for."""
    if step.profile.plan:
        return "torch has no one operation for the chain, and its compiler joins them: compile the step"
    return f"torch has no one operation for the chain, and its compiler joins them: torch.compile of {function or 'it'}"


def _compile_evidence(step: ProfiledStep) -> str:
    race = step.profile.compiled
    if race is None or race.ratio is None:
        return "; the gain is predicted, not measured"
    return f"; measured: the whole network, compiled, is {race.ratio:.2f} times as fast forward and backward"


def chain_operators(step: ProfiledStep) -> list[OperatorTime]:
    """Returns the operators of chains with a remedy, except chains dominated by one call."""
    found = []
    for chain in _chains(step):
        spent, stays = _chain_ms(step, chain), _longest_call_ms(step, chain)
        if step.share(spent - stays) >= COUNTS and stays <= 0.5 * spent:
            found += chain
    return found


def _chains(step: ProfiledStep) -> list[list[OperatorTime]]:
    """Returns the memory passes of each function and module with enough of them in the forward."""
    own = {one.name for one in step.profile.modules if one.kind.startswith(_TORCH_LAYERS)}
    passing = step.operators(
        lambda one: (
            one.phase in _CHAIN_PHASES and bool(one.where) and one.module not in own and _is_memory_pass(step, one)
        )
    )
    chains = group_by(passing, lambda one: (function_of(one), one.module)).values()
    return [ones for ones in chains if _count_calls([one for one in ones if one.phase != "backward"]) >= _MIN_PASSES]


def _is_memory_pass(step: ProfiledStep, one: OperatorTime) -> bool:
    """Returns whether an operator does little per element, and has many elements."""
    name = one.name.removeprefix("aten::").rstrip("_")
    return name in _MEMORY_PASS_OPS and step.cost_ms(one) >= step.small_ms * one.calls


def _chain_ms(step: ProfiledStep, ones: Sequence[OperatorTime]) -> float:
    return sum(step.cost_ms(one) for one in ones)


def _longest_call_ms(step: ProfiledStep, chain: Sequence[OperatorTime]) -> float:
    """Returns the milliseconds of the longest call in the forward plus the longest in the backward."""
    each = [(one.phase == "backward", step.cost_ms(one) / max(one.calls, 1.0)) for one in chain]
    return sum(max((ms for of, ms in each if of is backward), default=0.0) for backward in (False, True))


def _count_calls(ones: Sequence[OperatorTime]) -> float:
    return sum(one.calls for one in ones)


_COMPILED_PHASES: tuple[Phase, ...] = ("forward", "backward")

_GENERATED_KERNELS = ("cpp_fused", "triton_")  # name prefixes of the kernels that torch's compiler generates

MANY_SMALL_OPERATIONS = "operations are started one by one from Python"
"""The cause that is reported for a step of many small operations."""

_COMPILED_CALL_MS = 0.1
"""Overhead of a compiled call, forward and backward: a linear layer and ReLU took 0.146 ms, eagerly 0.047 ms."""

_RECURRENT_OPS = ("aten::gru", "aten::lstm", "aten::rnn_tanh", "aten::rnn_relu")
"""Recurrent operators, which iterate over time steps internally. torch.compile calls them unchanged."""


def compile_candidates(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields compiling, with an estimated gain, if calls of single operations cost much and no part is compiled.

    For a script the remedy compiles the model alone, without loss and update. Python still starts each product.
    """
    if step.profile.apart.compile_s or step.operators(lambda one: one.name.startswith(_GENERATED_KERNELS)):
        return
    hooks = hook_lines(step)  # the compiler excludes hooks
    recurrent = step.operators(lambda one: one.outer in _RECURRENT_OPS and not step.profile.plan)
    layers = {(one.module, one.where) for one in recurrent}  # a Task's step compiles their parts
    operators = step.operators(
        lambda one: one.phase in COMPUTING_PHASES and one.where not in hooks and (one.module, one.where) not in layers
    )
    compiled = [one for one in operators if one.phase in _COMPILED_PHASES]
    joinable = operators if step.profile.plan else [one for one in compiled if not is_product(one)]
    calls = sum(one.calls for one in joinable)
    won = sum(one.calls * min(step.launch_ms, step.cost_ms(one) / max(one.calls, 1e-9)) for one in joinable)
    if not step.profile.plan:  # Python still starts at least one kernel between two products
        won -= _COMPILED_CALL_MS + step.launch_ms * sum(one.calls for one in compiled if is_product(one) and one.flops)
    if not calls:
        return
    yield Remedy(
        cause=MANY_SMALL_OPERATIONS,
        where=heaviest(operators, step) or step.profile.step_where,
        remedy="compile the step" if step.profile.plan else "compile the model: torch.compile(model)",
        gain=step.share(won),
        evidence=f"{calls:.0f} operations in a step of {step.ms:.2f} ms that compiling could join, each "
        f"{1e3 * step.launch_ms:.1f} us to start here",
        axes={"compile": "step"} if step.on_cpu else {"compile": "step", "graphs": "step"},
    )


def compile_race_result(step: ProfiledStep) -> tuple[list[Remedy], list[str]]:
    """Returns compiling as a remedy if the compiled network won its race, and otherwise the line on the race."""
    race = step.profile.compiled
    if race is None:
        return [], []
    if race.ratio is None or race.low is None or race.high is None:
        return [], [f"The gain of compiling was not measured: {race.failure or 'too few pairs of windows'}."]
    found = f"{race.ratio:.2f} times as fast ({race.low:.2f} to {race.high:.2f})"
    what = f"the forward and backward of {race.network}, compiled and as they are in turn, on the inputs of a step"
    if not race.is_faster:
        return [], [f"Compiling is no remedy here. Measured: {what}. Compiled, they are {found}."]
    won = Remedy(
        cause=MANY_SMALL_OPERATIONS,
        where=heaviest(step.operators(lambda one: one.phase in _COMPILED_PHASES), step) or step.profile.step_where,
        remedy="compile the model: torch.compile(model)",
        gain=step.share(step.phase(*_COMPILED_PHASES)) * (1 - 1 / race.ratio),
        evidence=f"measured: {what}; compiled, they are {found}, after {race.compile_s or 0.0:.0f} s of compiling",
        won=(race.ratio, race.low, race.high),
    )
    return [won], []


def missing_measurements(step: ProfiledStep, found: Sequence[Remedy]) -> Iterator[str]:
    """Yields lines that name a missing measurement and the command that makes it."""
    is_task = bool(step.profile.plan)
    for one in found[:1]:
        how = "--try measures it, and hotloop tune finds the fastest plan" if is_task else "--try measures it"
        yield f"Starting operations one by one takes up to {percent(one.gain)} of the step. Gain of compiling: {how}."
    if is_task and not found:
        yield "No other plan was tried: one such as compile=package may win. Run hotloop tune."
