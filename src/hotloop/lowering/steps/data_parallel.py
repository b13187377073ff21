"""The parallel axis for ranks that share each step: each rank computes rows of the batch, and gradients are summed."""

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
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.task_parts.losses import weight_mean
from hotloop.core.task_parts.models import copy_model, set_training
from hotloop.data.batch_tree import map_tensors, to_device
from hotloop.data.feeds.feed import first_batch
from hotloop.data.feeds.rank_rows import non_tensor_parts
from hotloop.data.order import rank_bounds
from hotloop.distributed.wrappers.ddp import FIGURES, DdpModel, ModelWithLoss, ParameterHost
from hotloop.distributed.wrappers.fsdp import FsdpModel
from hotloop.distributed.wrappers.global_batch_rng import DrawPattern, DrawRecorder, GlobalBatchRng, RandomDraw
from hotloop.distributed.wrappers.sync_batch_norm import GlobalBatchNorm, backward_in_modes
from hotloop.errors import PlanError, describe_error
from hotloop.lowering.context import LoweringContext, counts_samples
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.steps.gradient_check import LaterGradients, WholeStep, autograd_ancestors, check_shares
from hotloop.lowering.transforms.accumulation import part_without_rows
from hotloop.task import StepResult


class DataParallelStep(EagerStep):
    """One training step of all ranks. Each rank has gradient, loss and sums of the whole batch.

    A rank's gradient has the weight of its loss: the sum over ranks of gradient(loss) * weight, divided by the sum of
    the weights, is the gradient of the whole batch's mean.
    """

    def __init__(self, parts: LoweringContext) -> None:
        _check_gradients(parts)
        with preserve_attributes(parts.task):
            self._joint = find_joint_ops(parts)
            draws = self._joint.draws
            self._later = LaterGradients(parts, draws, tried=check_shares(parts, draws))
        # the engine may replace parameters, so the optimizer is built afterwards
        self._module = self._engine(ModelWithLoss(parts.model, parts.compute), parts)
        super().__init__(parts)
        if draws.odd:  # equal numbers for different samples would be worse
            self.draws = self._step_draws(parts.device, rank=parts.world.rank)
            parts.say(f"each rank draws its own random numbers, which differ from those of one process: {draws.odd}")
        if paths := ", ".join(self.owned.of_batch.paths):
            parts.say(f"each rank draws its own numbers from {paths}, which differ from those of one process")
        self.draws.always = True  # ranks don't exchange which of them drew from Python's generator
        self._draws_alike = not draws.odd and not self.owned.of_batch.paths and parts.plan.parallel != "local"
        self._whole: WholeStep | None = None
        self._rows = self._samples = 0
        self._total: Any = 0

    def _engine(self, whole: ModelWithLoss, parts: LoweringContext) -> Any:
        """Returns the module that runs the model and sums gradients."""
        if parts.plan.parallel == "sharded":
            return FsdpModel(whole, parts.device)
        if self._joint.reentrant:  # DDP would mark parameters that the outer backward doesn't reach as unused
            raise PlanError(
                "parallel=data, and the model has parts computed anew by a reentrant torch.utils.checkpoint",
                expected="a backward that torch's DistributedDataParallel supports",
                fix="use checkpoint(..., use_reentrant=False) there, or parallel=towers",
            )
        return DdpModel(whole, parts.meter)

    def _backward(self, batch: Any, samples: int, step: int) -> StepResult:
        first, last = rank_bounds(samples, self.parts.world.rank, self.parts.world.ranks)
        self._rows, self._samples = last - first, samples
        seed = partial(self.draws.seed, step) if self._draws_alike else None
        self._whole = self._later.check(batch, (self._rows, samples), step, self.full_model, seed)
        return super()._backward(batch, samples, step)

    def _clip_unscaled(self) -> None:
        if self._whole is not None:
            scale = 1.0 if self.scaler is None else self.scaler.get_scale()
            self._later.compare(self._whole, self.holder, self._whole_loss, scale)
            self._whole = None
        super()._clip_unscaled()

    def _compute(self, batch: Any) -> StepResult:
        with self._global_result():
            loss, scalars = self._module(batch)
        return StepResult(loss, None, scalars)

    def _backward_of(self, loss: Tensor) -> None:
        """Runs backward, which may recompute parts of the forward pass in reverse order."""
        with self._global_result(in_order=False):
            backward_in_modes(loss if self.scaler is None else self.scaler.scale(loss))

    @contextmanager
    def _global_result(self, *, in_order: bool = True) -> Iterator[None]:
        """Makes batch norms and random draws inside the context equal to those of the whole batch."""
        world, draws = self.parts.world, self._joint.draws
        with ExitStack() as stack:
            if self._joint.norms:
                stack.enter_context(GlobalBatchNorm(self._samples, bool(self._rows), self.parts.meter))
            if draws.has_draws and (in_order or self._joint.redraws):
                stack.enter_context(GlobalBatchRng(draws, self._samples, world.rank, world.ranks, in_order=in_order))
            yield

    def _differentiate(self, computed: StepResult, batch: Any, samples: int) -> StepResult:
        """Sums figures and gradients over the ranks; a rank without rows takes part with weight 0."""
        weight = self.parts.weigh(batch, self._rows) if self._rows else 0
        self._module.counts = weight != 0 if isinstance(weight, Tensor) else bool(weight)
        values = [computed.loss.detach(), *(value.detach() for value in computed.scalars.values())]
        figures = self._weighted(values, weight)
        # A profile separates waiting from communication, so figures are sent separately then.
        if isinstance(self._module, DdpModel) and len(figures) <= FIGURES and self.parts.meter.ear is None:
            counted = weight.to(figures.dtype) if isinstance(weight, Tensor) else weight  # an int's quotient is float32
            self._backward_counted(computed.loss, counted / samples)
            totals = self._module.end_backward(figures)
            if not counts_samples(self.parts):
                self._divide_gradients(totals[0] / samples)
        else:
            totals = figures
            with self.parts.meter.measure_waiting():
                dist.all_reduce(totals)
            self._backward_counted(computed.loss, weight / totals[0])
            if isinstance(self._module, DdpModel):
                self._module.end_backward(figures[:0])
        self._total = samples if counts_samples(self.parts) else totals[0]
        means = (totals[1:] / totals[0]).unbind()
        self._whole_loss = means[0]
        return StepResult(means[0], None, dict(zip(computed.scalars, means[1:], strict=True)))

    def _weighted(self, values: list[Tensor], weight: Any) -> Tensor:
        """Returns the rank's weight and its weighted figures; figures of weight 0 may be NaN."""
        figures = torch.stack([value.to(self.sums["loss"].dtype) for value in (torch.ones_like(values[0]), *values)])
        if isinstance(weight, Tensor):
            return weight_mean(figures, weight)
        return figures.mul_(weight) if weight else figures.zero_()

    def _backward_counted(self, loss: Tensor, share: Tensor | float) -> None:
        """Runs backward of the rank's share of the whole loss; a loss of share 0 may be NaN."""
        if isinstance(share, Tensor):
            loss = torch.where(share > 0, loss * share.to(loss.dtype), 0.0)
        else:
            loss = loss * share if share else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        self._backward_of(loss)

    def _divide_gradients(self, share: Tensor) -> None:
        """Divides by the batch's share of counted samples, which no rank knew before; 0 if nothing counts."""
        divisor = torch.where(share > 0, share, 1.0)
        for value in self._filled:
            if value.grad is not None:
                value.grad /= divisor

    def full_model(self) -> AbstractContextManager[None]:
        return self._module.full_model()

    def _weight(self, batch: Any, samples: int) -> Any:
        return self._total


class ParameterHostStep(DataParallelStep):
    """Updates on rank 0 alone, on the CPU; the optimizers of other ranks get no gradients, and so have no state."""

    _module: ParameterHost

    def _engine(self, whole: ModelWithLoss, parts: LoweringContext) -> ParameterHost:
        return ParameterHost(whole, parts.world, parts.meter)

    @property
    def holder(self) -> nn.Module:
        return self._module.held

    def _differentiate(self, computed: StepResult, batch: Any, samples: int) -> StepResult:
        computed = super()._differentiate(computed, batch, samples)
        self._module.collect()
        return computed

    def _update(self) -> None:
        super()._update()
        self._module.broadcast()

    def optimizer_state(self, *, lent: bool = False) -> dict[str, Any]:
        return self.parts.world.broadcast_object(partial(super().optimizer_state, lent=lent))

    def on_state_restored(self) -> None:
        self._module.load_replica()
        if not self.parts.world.is_rank_zero:
            self.optimizer.state.clear()


@dataclass(frozen=True)
class JointOps:
    """Operations that ranks must coordinate within the forward pass.

    Attributes:
        norms: whether batches are normalised.
        draws: the pattern of the model's random draws.
        redraws: whether backward repeats draws, as for recomputed parts of the forward pass.
        elsewhere: whether the forward pass draws from NumPy's or Python's generator.
        reentrant: whether recomputed parts run a backward of their own within backward.
        scripted: the user's Python that backward calls, such as `the torch.autograd.Function Reversal`; empty if none.
    """

    norms: bool
    draws: DrawPattern
    redraws: bool = True
    elsewhere: bool = False
    reentrant: bool = False
    scripted: str = ""


def find_joint_ops(parts: LoweringContext) -> JointOps:
    """Runs a copy of the model on 2 and on 3 samples, which are padded to one length."""
    try:
        with preserve_generators(parts.device):
            more = to_device(first_batch(parts.splits, 3), parts.device)
            is_cut = not part_without_rows(more, 3) and not non_tensor_parts(more)
            few = map_tensors(lambda value: value[:2], more) if is_cut else first_batch(parts.splits, 2)
            first, second = (_observe_copy(parts, batch) for batch in (to_device(few, parts.device), more))
    except Exception as error:
        return JointOps(True, DrawPattern(odd=f"a test on 2 and 3 samples failed to run ({describe_error(error)})"))
    return JointOps(
        first.norms,
        DrawPattern.from_draws(first.drawn, second.drawn, (2, 3)),
        first.redraws or second.redraws,
        first.elsewhere or second.elsewhere,
        first.reentrant or second.reentrant,
        first.scripted,
    )


@dataclass
class _ObservedOps:
    norms: bool
    drawn: list[RandomDraw]
    redraws: bool
    elsewhere: bool
    reentrant: bool
    scripted: str


def _observe_copy(parts: LoweringContext, batch: Any) -> _ObservedOps:
    model, batch = set_training(copy_model(parts.model), parts.in_eval), map_tensors(torch.clone, batch)
    streams = RandomStreams(parts.task.seed, parts.device)
    streams.reseed("look")
    with DrawRecorder(parts.device) as draws, _CallRecorder() as calls:
        loss = parts.compute(model, batch).loss
    elsewhere = streams.has_drawn("look")
    python_nodes = [node for node in autograd_ancestors([loss]) if issubclass(type(node), BackwardCFunction)]
    functions = {node.name().removesuffix("Backward") for node in python_nodes}
    reentrant = "CheckpointFunction" in functions
    exported = {name for name in functions if name.startswith("GeneratedBackwardFor_")}  # torch.library's operators
    scripted = _scripted_name(functions - exported - {"CheckpointFunction"}, hooks=calls.hooks)
    redraws = bool(draws.drawn) and _has_backward_draws(loss, parts.device)
    return _ObservedOps(calls.norms, draws.drawn, redraws, elsewhere, reentrant, scripted)


def _scripted_name(functions: set[str], *, hooks: bool) -> str:
    if "BackwardHookFunction" in functions:
        return "a module's hook on its backward"
    if functions:
        return f"the torch.autograd.Function {min(functions)}"
    return "a hook on a tensor's gradient" if hooks else ""


def _has_backward_draws(loss: Tensor, device: torch.device) -> bool:
    """Whether the loss's backward draws random numbers; True if backward fails."""
    try:
        with DrawRecorder(device) as draws:
            backward_in_modes(loss)
    except Exception:
        return True
    return bool(draws.drawn)


class _CallRecorder(TorchFunctionMode):
    """Records calls of batch norm, and hooks on tensors of the forward pass."""

    norms = hooks = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.norms = self.norms or function is F.batch_norm
        self.hooks = self.hooks or function is Tensor.register_hook
        return function(*args, **(kwargs or {}))


def _check_gradients(parts: LoweringContext) -> None:
    """Refuses models and tasks that torch's engines can't sum or shard."""
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
