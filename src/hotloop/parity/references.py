"""Who takes the steps that are compared: float64, the baseline, and baselines that differ harmlessly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.core.float32_switches import apply_switches, read_switches
from hotloop.core.number_formats import REDUCED, lowest_format, product_format
from hotloop.core.random.rng import generator_for
from hotloop.core.state import State
from hotloop.data.batch_tree import batch_length, map_tensors, tree_tensors
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import has_batch_normalization, task_facts
from hotloop.parity.comparison import FLOAT32_UNIT, StepTensors, is_real, run_one_step
from hotloop.parity.evidence import StepErrors
from hotloop.parity.float64 import Float64Step, lower_in_float64
from hotloop.plan import Plan
from hotloop.task import Task

_UNITS = {
    "fp64": 2 * FLOAT32_UNIT,
    "fp32": 2 * FLOAT32_UNIT,
    "tf32": 2.0**-11,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-3,
}
"""By how much a parameter may be off without being another number in that precision."""


@dataclass(eq=False)
class ReferenceRun:
    """Takes a step its own way.

    Attributes:
        around: a context that it runs in.
        state, batch: what it makes of those that it is given, with a number that differs from step to step.
        unit: by how much it changes parameters, relative to their size; 0 if it doesn't.
        in_order: whether it leaves the samples of a batch in their order.
        active: False once it failed or wasn't harmless; nothing is asked of it from then on.
        account: what was seen of it.
    """

    name: str
    program: Program
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    state: Callable[[State, int], State] = lambda state, number: state
    batch: Callable[[Any, int], Any] = lambda batch, number: batch
    unit: float = 0.0
    is_in_order: bool = True
    is_active: bool = True
    errors: StepErrors = field(init=False)

    def __post_init__(self) -> None:
        self.errors = StepErrors(self.name)

    def step(self, state: State, batch: Any, number: int, *, lent: bool = False) -> tuple[StepTensors, State]:
        """One step from `state`, see `run_one_step`; `number` differs from step to step."""
        with self.around():
            return run_one_step(self.program, self.state(state, number), self.batch(batch, number), lent=lent)


class Float64Reference:
    """The step in float64, and whether it is one."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.program = lower_in_float64(task, device)
        step = self.program._step
        assert isinstance(step, Float64Step)
        self.watch = step.watch

    def step(self, state: State, batch: Any) -> StepTensors:
        """What one step does, until the next."""
        seen, _ = run_one_step(self.program, state, batch, lent=True)
        return dict(seen)  # each is asked for again and again

    def release(self) -> None:
        """Gives its memory back, which is twice that of any other; it takes no step any more."""
        self.program.optimizer.state.clear()
        for value in (*self.program.model.parameters(), *self.program.average.values()):
            value.grad = None
            value.data = value.data.new_empty(0)


def baseline_references(task: Task, device: str, *, few: bool) -> list[ReferenceRun]:
    """The baseline on a device, the same a rounding off, and unless `few` others that differ from it harmlessly.

    Where images are normalised over the batch, what rounding does to its means is in all that follows. So the few are two
    more there: with channels last, as compilers lay images, and without oneDNN.

    Without random draws, the samples of a batch may also come in another order; see `reordered_reference`.
    """
    found = _plain_references(task, Plan(device=device, workers=0), few)
    program = found[0].program
    normed = has_image_normalization(program)
    if device == "cpu" and (normed or not few):
        found.append(ReferenceRun("without oneDNN", program, around=_without_onednn))
    if few:
        return found
    if device == "cpu":
        found.append(ReferenceRun("in a row", program, around=_SequentialSums))
        if torch.get_num_threads() > 1:
            found.append(ReferenceRun("one thread", program, around=_with_one_thread))
    elif device.startswith("cuda"):
        found.append(ReferenceRun("without cuDNN", program, around=lambda: torch.backends.cudnn.flags(enabled=False)))
    return found


def reduced_precision_references(task: Task, plan: Plan, baseline: Program, *, few: bool) -> list[ReferenceRun]:
    """The eager step in a plan's reduced precision, and variants of it, as few as there can be if `few`.

    None for a plan that asks for no reduced precision, or for the one that the baseline has by torch's settings.
    """
    if plan.precision not in REDUCED:
        return []
    found = _plain_references(task, Plan(device=plan.device, precision=plan.precision, workers=0), few)
    same = plan.precision == "tf32" and found[0].program.parts.switches == baseline.parts.switches
    return [] if same else found


def references_in_formats(candidate: Program, baseline: Program, format_: str) -> list[ReferenceRun]:
    """The baseline under the candidate's switches, and in its dtype of fewest bits: peers of a plan that nobody asked to
    reduce the precision."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}.get(format_)
    kind, unit = baseline.device.type, _UNITS[format_]
    with candidate.around():
        switches = read_switches()

    @contextmanager
    def reduced() -> Iterator[None]:
        with (
            apply_switches(switches, kind),
            nullcontext() if dtype is None else torch.autocast(kind, dtype, cache_enabled=False),
        ):
            yield

    around = partial(run_within, [baseline], reduced)
    return [
        ReferenceRun("eager", baseline, around=around),
        ReferenceRun(
            "nudged", baseline, around=around, state=lambda state, number: nudge_state(state, number, unit), unit=unit
        ),
    ]


@contextmanager
def run_within(programs: Sequence[Program], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Has the steps of these Programs run in one more context each."""
    before = [(program, program.parts) for program in {id(program): program for program in programs}.values()]
    try:
        for program, parts in before:
            program.parts = replace(parts, around=(*parts.around, context))
        yield
    finally:
        for program, parts in before:
            program.parts = parts


def _nudge_unit(program: Program) -> float:
    """By how much parameters may be off without being other numbers in the format of the fewest bits that is computed in."""
    parts = program.parts
    half = parts.plan.precision if parts.plan.precision in ("bf16", "fp16") else None
    if half is not None:
        return _UNITS[half]
    facts = task_facts(parts)
    operators = {"matmul": True, "conv": facts.convolutions, "rnn": facts.recurrent}
    formats = {
        operator: product_format(operator, "float32", parts.device.type, parts.switches) or "fp32"
        for operator, there in operators.items()
        if there
    }
    return _UNITS[lowest_format(formats)]


def _plain_references(task: Task, plan: Plan, few: bool) -> list[ReferenceRun]:
    program = lower(task, plan)
    unit = _nudge_unit(program)
    found = [
        ReferenceRun("eager", program),
        ReferenceRun("nudged", program, state=lambda state, number: nudge_state(state, number, unit), unit=unit),
    ]
    turned = plan.with_axes(layout="channels_last")
    if has_image_normalization(program) or (not few and task_facts(program.parts).images):
        found.append(ReferenceRun("channels last", lower(task, turned)))
    return found


def has_image_normalization(program: Program) -> bool:
    """Whether it has layers that do so over the batch."""
    return has_batch_normalization(program.model) and task_facts(program.parts).images


def reordered_reference(program: Program) -> ReferenceRun:
    """The baseline with the samples of each batch in another order, which changes sums in their last bits alone."""
    return ReferenceRun("permuted", program, batch=_permute, is_in_order=False)


@contextmanager
def _with_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of other hardware when the switch is used
        with torch.backends.mkldnn.flags(enabled=False):
            yield


class _SequentialSums(TorchDispatchMode):
    """Sums whose numbers are added one after the other, as compilers write them; torch adds up pairs, which rounds less."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value: Any = args[0] if args else None
        if func in _LIKELIHOODS and not kwargs and value.dtype == torch.float32 and value.ndim > 1 and len(value):
            return _sequential_likelihood(*args)
        if func not in _SUMS or kwargs or not isinstance(value, Tensor) or not value.ndim:
            return func(*args, **kwargs or {})
        if value.dtype != torch.float32 or value.layout != torch.strided:
            return func(*args)
        given = args[1] if len(args) > 1 and args[1] else range(value.ndim)
        dims = sorted(dim % value.ndim for dim in ([given] if isinstance(given, int) else given))
        rows = value.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1) if dims else value[None]
        if len(rows) < 2:
            return func(*args)
        total = _sequential_sum(rows) / (len(rows) if func in _MEANS else 1)
        kept = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
        return total.reshape(kept) if args[2:] == (True,) else total


_LIKELIHOODS = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
"""Cross entropy sums in a kernel of its own."""


def _sequential_likelihood(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """What `aten.nll_loss_forward` gives: the loss, and the weight of all targets.

    Args:
        scores: log probabilities float32 (N, C, ...).
        target: int64 (N, ...).
        reduction: torch's number: 0 none, 1 mean, 2 sum.
    """
    kept = target != ignored
    places = torch.where(kept, target, 0)
    weights = kept.to(scores.dtype) if weight is None else weight[places] * kept
    losses = torch.where(kept, -scores.gather(1, places.unsqueeze(1)).squeeze(1) * weights, 0.0)
    if not reduction:
        return losses, scores.new_zeros(())
    total, whole = _sequential_sum(losses.flatten()), _sequential_sum(weights.flatten())
    return (total / whole if reduction == 1 else total), whole


_MEANS = (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, *_MEANS)
_ROW_LENGTH = 4096
"""So many numbers torch's compiler adds up before it begins another sum."""


def _sequential_sum(rows: Tensor) -> Tensor:
    """The sum over the first dimension."""
    whole = len(rows) // _ROW_LENGTH * _ROW_LENGTH
    if not whole:
        return _sum_one_by_one(rows)
    parts = _sum_one_by_one(rows[:whole].unflatten(0, (-1, _ROW_LENGTH)).transpose(0, 1))
    return parts.sum(0) + _sum_one_by_one(rows[whole:])


def _sum_one_by_one(rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1:], dtype=rows.dtype, device=rows.device)
    for row in rows.unbind():
        total += row
    return total


def nudge_state(state: State, number: int, unit: float = 2 * FLOAT32_UNIT) -> State:
    """A State whose parameters are off by `unit`, up, down or not at all, at random; by more where they have fewer bits."""
    generator = generator_for(number, "nudge")

    def nudge(value: Tensor) -> Tensor:
        draws = torch.randint(-1, 2, value.shape, generator=generator)
        if not is_real(value):
            return value
        return value + value * draws.to(value.dtype) * max(unit, torch.finfo(value.dtype).eps)

    return replace(state, parameters={name: nudge(value) for name, value in state.parameters.items()})


FARTHER, _SWITCHED = 8.0, 8.0
"""Times as far is a state nudged where nudges don't tell; an error of as many times more than that comes of a switch."""


def rounding_error(error: float, near: float) -> float:
    """What rounding may do, as a nudge `FARTHER` off shows it: its error, if a ReLU or a maximum was switched there.

    A plan may round more than a nudge does, and switch what none has switched by chance. An error that only grew with the
    nudge is made smaller with it.

    Args:
        near: the error after a nudge of the usual size.
    """
    return error if error > FARTHER * _SWITCHED * near else error / FARTHER


def _permute(batch: Any, number: int) -> Any:
    samples = batch_length(batch)
    order = torch.randperm(samples, generator=generator_for(number, "permuted"))
    if any(not value.ndim or len(value) != samples for value in tree_tensors(batch)):
        return batch
    return map_tensors(lambda value: value[order.to(value.device)], batch)
