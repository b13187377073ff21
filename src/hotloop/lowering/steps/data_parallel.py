"""The parallel axis, where ranks take each step together: each computes its rows of the batch, and all add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction as _OfPython
from torch.overrides import TorchFunctionMode

from hotloop.core.random.rng import Streams, preserved
from hotloop.core.task_parts.loss_info import weighted
from hotloop.core.task_parts.model_copy import copied
from hotloop.core.task_parts.module_modes import set_training
from hotloop.data.batch_tree import to_device
from hotloop.data.feeds.feed import peek
from hotloop.data.order import part
from hotloop.distributed.wrappers.ddp import FIGURES, Summed, Whole
from hotloop.distributed.wrappers.fsdp import Sharded
from hotloop.distributed.wrappers.global_batch_rng import Drawn, Pattern, Watching, WholeDraws
from hotloop.distributed.wrappers.parameter_host import Towers
from hotloop.distributed.wrappers.sync_batch_norm import WholeNorms, backward_within
from hotloop.errors import PlanError, blame
from hotloop.lowering.context import Ingredients, counts_samples
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.attributes import unchanged
from hotloop.lowering.steps.gradient_check import check_shares, nodes_below
from hotloop.lowering.steps.later_gradients import LaterShares
from hotloop.task import Computed


class SharedStep(EagerStep):
    """One training step of all ranks. Gradient, loss and sums are those of the whole batch, on each of them.

    A rank's gradient counts what its loss counts: sum over ranks of gradient(loss) * weight, divided by the sum of the
    weights, is the gradient of the whole batch's mean.
    """

    def __init__(self, parts: Ingredients) -> None:
        _check_gradients(parts)
        with unchanged(parts.task):
            self._as_one = look(parts)
            draws = self._as_one.draws
            self._later = LaterShares(parts, draws, tried=check_shares(parts, draws))
        self._module = self._engine(Whole(parts.model, parts.compute), parts)  # before the optimizer looks at it
        super().__init__(parts)
        if self._as_one.draws.odd:  # each rank has its own, rather than all the same ones for different samples
            self.draws = self._step_draws(parts.device, rank=parts.world.rank)
            parts.say(f"each rank draws its own random numbers, and not those of one process: {self._as_one.draws.odd}")
        if self.owned.of_batch.paths:
            parts.say(
                f"each rank draws its own numbers from {', '.join(self.owned.of_batch.paths)}, and not those of one process"
            )
        self.draws.always = True  # which of the ranks drew from Python's generator would be theirs to agree on
        self._rows = self._samples = 0
        self._total: Any = 0

    def _engine(self, whole: Whole, parts: Ingredients) -> Any:
        """What runs the model, and adds gradients up."""
        if parts.plan.parallel == "sharded":
            return Sharded(whole, parts.device)
        if (
            self._as_one.reentrant
        ):  # parameters that the outer backward doesn't find are marked as unused, and so as ready
            raise PlanError(
                "parallel=data, and the model has parts computed anew by a reentrant torch.utils.checkpoint",
                expected="a backward that torch's DistributedDataParallel can follow",
                fix="use checkpoint(..., use_reentrant=False) there, or parallel=towers",
            )
        return Summed(whole, parts.meter)

    def _backward(self, batch: Any, samples: int, step: int) -> Computed:
        first, last = part(samples, self.parts.world.rank, self.parts.world.ranks)
        self._rows, self._samples = last - first, samples
        self._later.check(batch, self._rows, step, self.together)
        return super()._backward(batch, samples, step)

    def _compute(self, batch: Any) -> Computed:
        with self._of_the_whole():
            loss, scalars = self._module(batch)
        return Computed(loss, None, scalars)

    def _backward_of(self, loss: Tensor) -> None:
        """Parts of the forward pass may be computed anew here, last ones first."""
        with self._of_the_whole(in_order=False):
            backward_within(loss if self.scaler is None else self.scaler.scale(loss))

    @contextmanager
    def _of_the_whole(self, *, in_order: bool = True) -> Iterator[None]:
        """Has what is computed within normalise, and draw, as the whole batch would."""
        world, draws = self.parts.world, self._as_one.draws
        with ExitStack() as stack:
            if self._as_one.norms:
                stack.enter_context(WholeNorms(self._samples, bool(self._rows), self.parts.meter))
            if draws.any and (in_order or self._as_one.redraws):
                stack.enter_context(WholeDraws(draws, self._samples, world.rank, world.ranks, in_order=in_order))
            yield

    def _differentiate(self, computed: Computed, batch: Any, samples: int) -> Computed:
        """Adds up figures and gradients of the ranks; a rank without rows computes too, and its figures count 0."""
        weight = self.parts.weigh(batch, self._rows) if self._rows else 0
        self._module.counts = weight != 0 if isinstance(weight, Tensor) else bool(weight)
        values = [computed.loss.detach(), *(value.detach() for value in computed.scalars.values())]
        figures = self._weighted(values, weight)
        # A profile separates waiting from communication, so the figures travel by themselves there.
        if isinstance(self._module, Summed) and len(figures) <= FIGURES and self.parts.meter.ear is None:
            self._backward_counted(computed.loss, weight / samples)
            totals = self._module.end_backward(figures)
            if not counts_samples(self.parts):
                self._divide_gradients(totals[0] / samples)
        else:
            totals = figures
            with self.parts.meter.waiting():
                dist.all_reduce(totals)
            self._backward_counted(computed.loss, weight / totals[0])
            if isinstance(self._module, Summed):
                self._module.end_backward(figures[:0])
        self._total = samples if counts_samples(self.parts) else totals[0]
        means = (totals[1:] / totals[0]).unbind()
        return Computed(means[0], None, dict(zip(computed.scalars, means[1:], strict=True)))

    def _weighted(self, values: list[Tensor], weight: Any) -> Tensor:
        """Returns the rank's weight and its figures times the weight; the figures of a rank that counts nothing may be NaN."""
        own = torch.stack([value.to(self.sums["loss"].dtype) for value in (torch.ones_like(values[0]), *values)])
        return weighted(own, weight) if isinstance(weight, Tensor) else own.mul_(weight) if weight else own.zero_()

    def _backward_counted(self, loss: Tensor, share: Tensor | float) -> None:
        """Backward of the rank's share of the whole loss; the loss of a rank that counts nothing may be NaN."""
        if isinstance(share, Tensor):
            loss = torch.where(share > 0, loss * share.to(loss.dtype), 0.0)
        else:
            loss = loss * share if share else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        self._backward_of(loss)

    def _divide_gradients(self, share: Tensor) -> None:
        """Divides by the share of the batch that counts, which no rank knew before; where nothing counts gradients are 0."""
        divisor = torch.where(share > 0, share, 1.0)
        for value in self._filled:
            if value.grad is not None:
                value.grad /= divisor

    def together(self) -> AbstractContextManager[None]:
        return self._module.together()

    def _weight(self, batch: Any, samples: int) -> Any:
        return self._total


class TowersStep(SharedStep):
    """The first rank alone updates, on the CPU; optimizers of the others get no gradients, and so keep no state."""

    _module: Towers

    def _engine(self, whole: Whole, parts: Ingredients) -> Towers:
        return Towers(whole, parts.world, parts.meter)

    @property
    def holder(self) -> nn.Module:
        return self._module.held

    def _differentiate(self, computed: Computed, batch: Any, samples: int) -> Computed:
        computed = super()._differentiate(computed, batch, samples)
        self._module.collect()
        return computed

    def _update(self) -> None:
        super()._update()
        self._module.spread()

    def optimizer_state(self, *, lent: bool = False) -> dict[str, Any]:
        return self.parts.world.from_first(partial(super().optimizer_state, lent=lent))

    def rebind(self) -> None:
        self._module.hold()
        if not self.parts.world.first:
            self.optimizer.state.clear()


@dataclass(frozen=True)
class Look:
    """What ranks must do together within the forward pass.

    Attributes:
        norms: whether batches are normalised.
        draws: how the model draws random numbers.
        redraws: whether backward draws some anew, as where parts of the forward pass are computed again.
        elsewhere: whether the forward pass draws from NumPy's or Python's generator.
        reentrant: whether such parts run a backward of their own within backward.
        scripted: what backward calls of the user's Python, such as `the torch.autograd.Function Reversal`; empty if nothing.
    """

    norms: bool
    draws: Pattern
    redraws: bool = True
    elsewhere: bool = False
    reentrant: bool = False
    scripted: str = ""


def look(parts: Ingredients) -> Look:
    """Runs a copy of the model on 2 and on 3 samples; nothing of it stays."""
    few, more = 2, 3
    try:
        with preserved(parts.device):
            seen = [_watched(parts, samples) for samples in (few, more)]
    except Exception as error:
        return Look(True, Pattern(odd=f"it couldn't be tried on {few} and {more} samples ({blame(error)})"))
    redraws = any(one.redraws for one in seen)
    pattern = Pattern.of(seen[0].drawn, seen[1].drawn, (few, more))
    elsewhere, reentrant = any(one.elsewhere for one in seen), any(one.reentrant for one in seen)
    return Look(seen[0].norms, pattern, redraws, elsewhere, reentrant, seen[0].scripted)


@dataclass
class _Seen:
    norms: bool
    drawn: list[Drawn]
    redraws: bool
    elsewhere: bool
    reentrant: bool
    scripted: str


def _watched(parts: Ingredients, samples: int) -> _Seen:
    model = set_training(copied(parts.model), parts.in_eval)
    batch = to_device(peek(parts.roles, samples), parts.device)
    streams = Streams(parts.task.seed, parts.device)
    streams.reseed("look")
    with Watching(parts.device) as draws, _Calls() as calls:
        loss = parts.compute(model, batch).loss
    elsewhere = streams.drawn("look")
    functions = {
        node.name().removesuffix("Backward") for node in nodes_below([loss]) if issubclass(type(node), _OfPython)
    }
    reentrant = "CheckpointFunction" in functions
    exported = {name for name in functions if name.startswith("GeneratedBackwardFor_")}  # of torch.library's operators
    scripted = _scripted(functions - exported - {"CheckpointFunction"}, hooks=calls.hooks)
    redraws = bool(draws.drawn) and _redraws(loss, parts.device)
    return _Seen(calls.norms, draws.drawn, redraws, elsewhere, reentrant, scripted)


def _scripted(functions: set[str], *, hooks: bool) -> str:
    if "BackwardHookFunction" in functions:
        return "a module's hook on its backward"
    if functions:
        return f"the torch.autograd.Function {min(functions)}"
    return "a hook on a tensor's gradient" if hooks else ""


def _redraws(loss: Tensor, device: torch.device) -> bool:
    """Whether its backward draws; it may where that can't be tried."""
    try:
        with Watching(device) as draws:
            backward_within(loss)
    except Exception:  # what a backward does that fails, nobody knows
        return True
    return bool(draws.drawn)


class _Calls(TorchFunctionMode):
    """Notes whether a batch is normalised, and whether a hook is hung on what a forward pass computes."""

    norms = hooks = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.norms = self.norms or function is F.batch_norm
        self.hooks = self.hooks or function is Tensor.register_hook
        return function(*args, **(kwargs or {}))


def _check_gradients(parts: Ingredients) -> None:
    """Refuses what torch's engines can't add up, or spread."""
    if parts.plan.parallel == "sharded" and parts.task.average is not None:
        raise PlanError(
            "parallel=sharded with an average of the weights", fix="use parallel=data, or leave average out"
        )
    single = [name for name, value in parts.model.named_parameters() if not value.ndim]
    if parts.plan.parallel == "sharded" and single:
        raise PlanError(
            f"parallel=sharded, and the parameter {single[0]!r} has no dimension",
            expected="parameters that can be cut along their first dimension",
            fix="make it one of shape (1,), or use parallel=data",
        )
    for name, module in parts.model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise PlanError(
                f"parallel={parts.plan.parallel} with sparse gradients, which {name or 'the model'} makes",
                expected="dense gradients, which ranks can add up",
                fix="leave out sparse=True there, or use parallel=none",
            )
