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

from hotloop.core.float32_switches import read, running_under
from hotloop.core.number_formats import REDUCED, coarsest, format_of
from hotloop.core.random.rng import generator_for
from hotloop.core.state import State
from hotloop.data.batch_tree import batch_length, map_tensors, tensors
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.lowering.task_facts import facts_of, normalises
from hotloop.parity.comparison import UNIT, Seen, is_real, one_step
from hotloop.parity.evidence import Account
from hotloop.parity.float64 import ExactStep, lower_exactly
from hotloop.plan import Plan
from hotloop.task import Task

_UNITS = {"fp64": 2 * UNIT, "fp32": 2 * UNIT, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-3}
"""By how much a parameter may be off without being another number in that precision."""


@dataclass(eq=False)
class Witness:
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
    in_order: bool = True
    active: bool = True
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.account = Account(self.name)

    def step(self, state: State, batch: Any, number: int, *, lent: bool = False) -> tuple[Seen, State]:
        """One step from `state`, see `one_step`; `number` differs from step to step."""
        with self.around():
            return one_step(self.program, self.state(state, number), self.batch(batch, number), lent=lent)


class Truth:
    """The step in float64, and whether it is one."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.program = lower_exactly(task, device)
        step = self.program._step
        assert isinstance(step, ExactStep)
        self.watch = step.watch

    def step(self, state: State, batch: Any) -> Seen:
        """What one step does, until the next."""
        seen, _ = one_step(self.program, state, batch, lent=True)
        return dict(seen)  # each is asked for again and again

    def let_go(self) -> None:
        """Gives its memory back, which is twice that of any other; it takes no step any more."""
        self.program.optimizer.state.clear()
        for value in (*self.program.model.parameters(), *self.program.average.values()):
            value.grad = None
            value.data = value.data.new_empty(0)


def baselines(task: Task, device: str, *, few: bool) -> list[Witness]:
    """The baseline on a device, the same a rounding off, and unless `few` others that differ from it harmlessly.

    Where images are normalised over the batch, what rounding does to its means is in all that follows. So the few are two
    more there: with channels last, as compilers lay images, and without oneDNN.

    Without random draws, the samples of a batch may also come in another order; see `in_another_order`.
    """
    found = _plain(task, Plan(device=device, workers=0), few)
    program = found[0].program
    normed = normalises_images(program)
    if device == "cpu" and (normed or not few):
        found.append(Witness("without oneDNN", program, around=_without_onednn))
    if few:
        return found
    if device == "cpu":
        found.append(Witness("in a row", program, around=_InARow))
        if torch.get_num_threads() > 1:
            found.append(Witness("one thread", program, around=_one_thread))
    elif device.startswith("cuda"):
        found.append(Witness("without cuDNN", program, around=lambda: torch.backends.cudnn.flags(enabled=False)))
    return found


def peers(task: Task, plan: Plan, baseline: Program, *, few: bool) -> list[Witness]:
    """The eager step in a plan's reduced precision, and variants of it, as few as there can be if `few`.

    None for a plan that asks for no reduced precision, or for the one that the baseline has by torch's settings.
    """
    if plan.precision not in REDUCED:
        return []
    found = _plain(task, Plan(device=plan.device, precision=plan.precision, workers=0), few)
    same = plan.precision == "tf32" and found[0].program.parts.switches == baseline.parts.switches
    return [] if same else found


def in_formats_of(candidate: Program, baseline: Program, format_: str) -> list[Witness]:
    """The baseline under the candidate's switches, and in its dtype of fewest bits: peers of a plan that nobody asked to
    reduce the precision."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}.get(format_)
    kind, unit = baseline.device.type, _UNITS[format_]
    with candidate.around():
        switches = read()

    @contextmanager
    def reduced() -> Iterator[None]:
        with (
            running_under(switches, kind),
            nullcontext() if dtype is None else torch.autocast(kind, dtype, cache_enabled=False),
        ):
            yield

    around = partial(within, [baseline], reduced)
    return [
        Witness("eager", baseline, around=around),
        Witness("nudged", baseline, around=around, state=lambda state, number: nudged(state, number, unit), unit=unit),
    ]


@contextmanager
def within(programs: Sequence[Program], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Has the steps of these Programs run in one more context each."""
    before = [(program, program.parts) for program in {id(program): program for program in programs}.values()]
    try:
        for program, parts in before:
            program.parts = replace(parts, around=(*parts.around, context))
        yield
    finally:
        for program, parts in before:
            program.parts = parts


def _unit(program: Program) -> float:
    """By how much parameters may be off without being other numbers in the format of the fewest bits that is computed in."""
    parts = program.parts
    half = parts.plan.precision if parts.plan.precision in ("bf16", "fp16") else None
    if half is not None:
        return _UNITS[half]
    facts = facts_of(parts)
    operators = {"matmul": True, "conv": facts.convolutions, "rnn": facts.recurrent}
    formats = {
        operator: format_of(operator, "float32", parts.device.type, parts.switches) or "fp32"
        for operator, there in operators.items()
        if there
    }
    return _UNITS[coarsest(formats)]


def _plain(task: Task, plan: Plan, few: bool) -> list[Witness]:
    program = lower(task, plan)
    unit = _unit(program)
    found = [
        Witness("eager", program),
        Witness("nudged", program, state=lambda state, number: nudged(state, number, unit), unit=unit),
    ]
    turned = plan.with_axes(layout="channels_last")
    if normalises_images(program) or (not few and facts_of(program.parts).images):
        found.append(Witness("channels last", lower(task, turned)))
    return found


def normalises_images(program: Program) -> bool:
    """Whether it has layers that do so over the batch."""
    return normalises(program.model) and facts_of(program.parts).images


def in_another_order(program: Program) -> Witness:
    """The baseline with the samples of each batch in another order, which changes sums in their last bits alone."""
    return Witness("permuted", program, batch=_permuted, in_order=False)


@contextmanager
def _one_thread() -> Iterator[None]:
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


class _InARow(TorchDispatchMode):
    """Sums whose numbers are added one after the other, as compilers write them; torch adds up pairs, which rounds less."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value: Any = args[0] if args else None
        if func in _LIKELIHOODS and not kwargs and value.dtype == torch.float32 and value.ndim > 1 and len(value):
            return _likelihood_in_a_row(*args)
        if func not in _SUMS or kwargs or not isinstance(value, Tensor) or not value.ndim:
            return func(*args, **kwargs or {})
        if value.dtype != torch.float32 or value.layout != torch.strided:
            return func(*args)
        given = args[1] if len(args) > 1 and args[1] else range(value.ndim)
        dims = sorted(dim % value.ndim for dim in ([given] if isinstance(given, int) else given))
        rows = value.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1) if dims else value[None]
        if len(rows) < 2:
            return func(*args)
        total = _in_a_row(rows) / (len(rows) if func in _MEANS else 1)
        kept = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
        return total.reshape(kept) if args[2:] == (True,) else total


_LIKELIHOODS = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
"""Cross entropy sums in a kernel of its own."""


def _likelihood_in_a_row(
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
    total, whole = _in_a_row(losses.flatten()), _in_a_row(weights.flatten())
    return (total / whole if reduction == 1 else total), whole


_MEANS = (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, *_MEANS)
_ROW = 4096
"""So many numbers torch's compiler adds up before it begins another sum."""


def _in_a_row(rows: Tensor) -> Tensor:
    """The sum over the first dimension."""
    whole = len(rows) // _ROW * _ROW
    if not whole:
        return _one_by_one(rows)
    parts = _one_by_one(rows[:whole].unflatten(0, (-1, _ROW)).transpose(0, 1))
    return parts.sum(0) + _one_by_one(rows[whole:])


def _one_by_one(rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1:], dtype=rows.dtype, device=rows.device)
    for row in rows.unbind():
        total += row
    return total


def nudged(state: State, number: int, unit: float = 2 * UNIT) -> State:
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


def of_rounding(error: float, near: float) -> float:
    """What rounding may do, as a nudge `FARTHER` off shows it: its error, if a ReLU or a maximum was switched there.

    A plan may round more than a nudge does, and switch what none has switched by chance. An error that only grew with the
    nudge is made smaller with it.

    Args:
        near: the error after a nudge of the usual size.
    """
    return error if error > FARTHER * _SWITCHED * near else error / FARTHER


def _permuted(batch: Any, number: int) -> Any:
    samples = batch_length(batch)
    order = torch.randperm(samples, generator=generator_for(number, "permuted"))
    if any(not value.ndim or len(value) != samples for value in tensors(batch)):
        return batch
    return map_tensors(lambda value: value[order.to(value.device)], batch)
