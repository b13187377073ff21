"""Reference runs of a step: float64, the baseline, and harmless changes of the baseline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotloop.core.float32_switches import apply_switches, read_switches
from hotloop.core.number_formats import REDUCED, lowest_format, product_format
from hotloop.core.random.rng import generator_for
from hotloop.core.state import State
from hotloop.core.torch_private import TorchDispatchMode
from hotloop.data.batch_tree import batch_length, map_tensors, tree_tensors
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import has_batch_normalization, task_facts
from hotloop.parity.comparison import FLOAT32_UNIT, StepErrors, StepTensors, is_real, run_one_step
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
"""Relative size of a nudge by format: the largest change of a parameter that its format doesn't resolve."""


@dataclass(eq=False)
class ReferenceRun:
    """One way to run a step.

    Attributes:
        around: context of the step.
        state, batch: change the State and the batch, with a number that differs from step to step.
        unit: relative change of the parameters; 0 for none.
        is_in_order: whether the samples of a batch keep their order.
        is_active: False after a failure or a change that wasn't harmless; it then takes no more steps.
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
        """Runs one step from `state`, see `run_one_step`; `number` differs from step to step."""
        with self.around():
            return run_one_step(self.program, self.state(state, number), self.batch(batch, number), lent=lent)


class Float64Reference:
    """Reference step in float64, with the check that it stays float64."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.program = lower_in_float64(task, device)
        step = self.program._step
        assert isinstance(step, Float64Step)
        self.watch = step.watch

    def step(self, state: State, batch: Any) -> StepTensors:
        """Returns the tensors of one step, valid until the next step."""
        tensors, _ = run_one_step(self.program, state, batch, lent=True)
        return dict(tensors)  # converted once: each is read several times

    def release(self) -> None:
        """Frees the memory, twice that of another Program; no step is possible afterwards."""
        self.program.optimizer.state.clear()
        for value in (*self.program.model.parameters(), *self.program.average.values()):
            value.grad = None
            value.data = value.data.new_empty(0)


def baseline_references(task: Task, device: str, *, few: bool) -> list[ReferenceRun]:
    """Returns the baseline on a device, a nudged baseline, and unless `few` others with harmless changes.

    With images normalized over the batch, rounding of the means affects all later layers. There the few are two more:
    with channels last, as compilers choose, and without oneDNN. Without random draws `reordered_reference` is added
    later.
    """
    runs = _plain_references(task, Plan(device=device, workers=0), few)
    program = runs[0].program
    if device == "cpu" and (not few or has_image_normalization(program)):
        runs.append(ReferenceRun("without oneDNN", program, around=_without_onednn))
    if few:
        return runs
    if device == "cpu":
        runs.append(ReferenceRun("in a row", program, around=SequentialSums))
        if torch.get_num_threads() > 1:
            runs.append(ReferenceRun("one thread", program, around=_with_one_thread))
    elif device.startswith("cuda"):
        runs.append(ReferenceRun("without cuDNN", program, around=lambda: torch.backends.cudnn.flags(enabled=False)))
    return runs


def reduced_precision_references(task: Task, plan: Plan, baseline: Program, *, few: bool) -> list[ReferenceRun]:
    """Returns the eager step in a plan's reduced precision with changes of it, only the nudged one if `few`.

    Empty for a plan without reduced precision, or with the one that the baseline has by torch's settings.
    """
    if plan.precision not in REDUCED:
        return []
    runs = _plain_references(task, Plan(device=plan.device, precision=plan.precision, workers=0), few)
    same = plan.precision == "tf32" and runs[0].program.parts.switches == baseline.parts.switches
    return [] if same else runs


def references_in_formats(candidate: Program, baseline: Program, format_: str) -> list[ReferenceRun]:
    """Returns the baseline under the candidate's switches in the dtype of its lowest format, for an unrequested
    reduction.
    """
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
    nudge = partial(nudge_state, unit=unit)
    return [
        ReferenceRun("eager", baseline, around=around),
        ReferenceRun("nudged", baseline, around=around, state=nudge, unit=unit),
    ]


@contextmanager
def run_within(programs: Sequence[Program], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Runs the steps of these Programs in one more context each."""
    before = [(program, program.parts) for program in {id(program): program for program in programs}.values()]
    try:
        for program, parts in before:
            program.parts = replace(parts, around=(*parts.around, context))
        yield
    finally:
        for program, parts in before:
            program.parts = parts


def _nudge_unit(program: Program) -> float:
    """Returns the relative size of a nudge, from the format of fewest bits in which the Program computes."""
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
    runs = [
        ReferenceRun("eager", program),
        ReferenceRun("nudged", program, state=partial(nudge_state, unit=unit), unit=unit),
    ]
    if has_image_normalization(program) or (not few and task_facts(program.parts).images):
        runs.append(ReferenceRun("channels last", lower(task, plan.with_axes(layout="channels_last"))))
    return runs


def has_image_normalization(program: Program) -> bool:
    """Checks whether layers normalize images over the batch."""
    return has_batch_normalization(program.model) and task_facts(program.parts).images


def reordered_reference(program: Program) -> ReferenceRun:
    """Returns the baseline with the samples of each batch in another order, which changes only rounding."""
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
        warnings.simplefilter("ignore")  # torch warns about other hardware here
        with torch.backends.mkldnn.flags(enabled=False):
            yield


class SequentialSums(TorchDispatchMode):
    """Adds up sums one number after the other, as compiled code does; torch's pairwise sums round less."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value: Any = args[0] if args else None
        if func in _LIKELIHOODS and not kwargs and value.dtype == torch.float32 and value.ndim > 1 and len(value):
            return _sequential_likelihood(*args)
        if func not in _SUMS or kwargs or not isinstance(value, Tensor) or not value.ndim:
            return func(*args, **kwargs or {})
        if value.dtype != torch.float32 or value.layout != torch.strided:
            return func(*args)
        summed = args[1] if len(args) > 1 and args[1] else range(value.ndim)
        dims = sorted(dim % value.ndim for dim in ([summed] if isinstance(summed, int) else summed))
        rows = value.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1) if dims else value[None]
        if len(rows) < 2:
            return func(*args)
        total = _sequential_sum(rows) / (len(rows) if func in _MEANS else 1)
        shape = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
        return total.reshape(shape) if args[2:] == (True,) else total


_LIKELIHOODS = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
"""Cross entropy has a sum in a kernel of its own."""


def _sequential_likelihood(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """Returns the loss and the sum of weights of `aten.nll_loss_forward`.

    Args:
        scores: log probabilities, float32 (N, C, ...).
        target: int64 (N, ...).
        reduction: torch's number: 0 none, 1 mean, 2 sum.
    """
    counts = target != ignored
    places = torch.where(counts, target, 0)
    weights = counts.to(scores.dtype) if weight is None else weight[places] * counts
    losses = torch.where(counts, -scores.gather(1, places.unsqueeze(1)).squeeze(1) * weights, 0.0)
    if not reduction:
        return losses, scores.new_zeros(())
    total, whole = _sequential_sum(losses.flatten()), _sequential_sum(weights.flatten())
    return (total / whole if reduction == 1 else total), whole


_MEANS = (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, *_MEANS)
_ROW_LENGTH = 4096
"""Numbers that torch's compiler adds up in one sum."""


def _sequential_sum(rows: Tensor) -> Tensor:
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
    """Returns the State with parameters changed by `unit`, up, down or not at all, at random; at least by their own
    eps.
    """
    generator = generator_for(number, "nudge")

    def nudge(value: Tensor) -> Tensor:
        draws = torch.randint(-1, 2, value.shape, generator=generator)
        if not is_real(value):
            return value
        return value + value * draws.to(value.dtype) * max(unit, torch.finfo(value.dtype).eps)

    return replace(state, parameters={name: nudge(value) for name, value in state.parameters.items()})


FARTHER, _SWITCHED = 8.0, 8.0
"""Factor of larger nudges; an error that grows by more than `_SWITCHED` times this comes from a switched ReLU or
maximum.
"""


def rounding_error(error: float, near: float) -> float:
    """Returns the possible rounding error, from the error after a nudge `FARTHER` times as large.

    A plan may round more than a nudge and switch a ReLU that no nudge switches by chance: then the error counts as it
    is. An error that only grew with the nudge is divided by the same factor.

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
