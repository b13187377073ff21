"""The one builder of the step: reseed, forward, backward, clip, update, schedule, average, sums."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hotloop.core.random.rng import StepSeeds
from hotloop.core.state import State, copy_into, tree_leaves
from hotloop.core.task_parts.loss_info import weight_mean
from hotloop.core.task_parts.module_modes import switchable_optimizers
from hotloop.core.task_parts.optimizer_state import capture_state as capture_optimizer
from hotloop.core.task_parts.optimizer_state import inner_optimizers
from hotloop.core.task_parts.schedules import schedules_of
from hotloop.errors import TaskError
from hotloop.lowering.checks.first_step import check_clipping, check_loss, check_losses, report_means
from hotloop.lowering.checks.plan_limits import check_optimizer, check_trainable
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.losses.loss_sum import check_loss_sum
from hotloop.lowering.object_state.attributes import schedule_functions
from hotloop.lowering.step_generators import StepGenerators
from hotloop.lowering.transforms.accumulation import accumulate
from hotloop.lowering.transforms.optimizer import flush_subnormals
from hotloop.task import StepResult, YieldedResult, single_optimizer_error


class EagerStep:
    """One training step, operation by operation.

    Attributes:
        optimizer, schedule: made by the Task's factories.
        switched: the optimizer, or those that it wraps, if `train()` and `eval()` switch its weights.
        draws: seeds the generators before each step.
        owned: the random generators that model, loss, step, optimizer and schedule hold.
        ran: how many steps its compiled program took; None without one.
        look_s: seconds of seeing once whether it still does what was compiled; 0 where nothing was.
        cut_from: the arrays whose rows `run` gets as batches, as they are; None where batches come otherwise.
        cuts_batches: whether `run` takes a `RowBatches`, and cuts several batches at once.
        draws_by_words: whether its random zeros and ones are other ones than the baseline's; see `WordDrawMode`.
        scaler: decides by how much fp16's loss is scaled; None in other precisions.
        scale: what a compiled step scales its loss by, 0-dim, on the device; None in other precisions.
        average: exponential average by parameter name, of what this rank holds; empty without one.
        outer: momentum by parameter name of ranks that step towards their average; empty elsewhere.
        sums: over the epoch so far: `loss` and further scalars, each weighted (0-dim, on the device), `weight` and
            `samples`.
    """

    steps_run: int | None = None
    look_s = 0.0
    draws_by_words = False
    first_split_step: Any = None
    cuts_batches = False

    def __init__(self, parts: LoweringContext) -> None:
        task, model = parts.task, parts.model
        self.parts = parts
        self.optimizer = parts.build_optimizer(self.holder)
        self.scaler = torch.amp.GradScaler(parts.device.type) if parts.scaled else None
        self.scale = torch.ones((), device=parts.device) if parts.scaled else None
        self.schedule = task.build_schedule(self.optimizer, parts.splits.batches)
        self.switched = switchable_optimizers(self.optimizer, list(inner_optimizers(self.optimizer).values()))
        check_optimizer(parts, self.optimizer, switches=bool(self.switched))
        for optimizer in self.switched:
            optimizer.train()
        self._as_built = self.trainable()
        self._clears_itself = type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        self.average: dict[str, Tensor] = {}
        if task.average is not None:
            self.average = {n: v.detach().clone() for n, v in model.named_parameters() if v.requires_grad}
            self._average = get_ema_multi_avg_fn(task.average)
        self._list_parameters()
        self._check_ownership()
        self.owned = StepGenerators(task, model, self.optimizer, self.schedule, parts.world)
        self.draws = self._step_draws(*parts.devices)
        self._needs_closure = needs_closure(self.optimizer)
        self._sweeps = parts.plan.optimizer == "fused" and parts.device.type == "cpu" and parts.world.is_single
        self._checked = self._has_said_means = False
        self.outer: dict[str, Tensor] = {}
        self.sums: dict[str, Any] = {}
        self.reset_sums()

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs step number `step`; returns the loss, 0-dim, on the device."""
        computed = self._closure_step(batch, samples, step) if self._needs_closure else self._run(batch, samples, step)
        self.step_schedule()
        if self.average:
            self.update_average(list(self.average.values()), self._averaged)
        loss = computed.loss.detach()
        self._add(loss, computed.scalars, self._weight(batch, samples))
        self.sums["samples"] += samples
        self.draws.note()
        return loss

    def run(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[int, int]]:
        """Runs a step on each batch, from step number `step` on; yields (steps, samples) as they are done."""
        for batch, samples in batches:
            self(batch, samples, step)
            step += 1
            yield 1, samples

    def _step_draws(self, *devices: torch.device, rank: int = 0) -> StepSeeds:
        """What seeds the generators before each step, those among them that the Task's parts hold."""
        return StepSeeds(self.parts.task.seed, *devices, rank=rank, further=self.owned.seed)

    def begin_span(self) -> None:
        """Prepares the generators for steps that follow; anything may have changed them before."""
        self.draws.begin_span()
        self.owned.refresh()

    def _run(self, batch: Any, samples: int, step: int) -> StepResult:
        """Gradients and update."""
        computed = self._backward(batch, samples, step)
        self._update()
        if self._sweeps:
            flush_subnormals(self.optimizer, step)
        return computed

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _backward(self, batch: Any, samples: int, step: int) -> StepResult:
        self.draws.seed(step)
        self._clear_gradients()
        first = not self._checked
        if self.parts.plan.accumulation > 1:
            with check_losses(self.parts, batch) if first else nullcontext():
                computed = accumulate(self.parts, self.parts.model, batch, samples, self._backward_of)
            self._checked = True
        else:
            computed = self._compute_first(batch) if first else self._compute(batch)
            computed = self._differentiate(computed, batch, samples)
        if first:
            check_clipping(self.parts.task, self._trainable)
        self._clip_unscaled()
        return computed

    def _differentiate(self, computed: StepResult, batch: Any, samples: int) -> StepResult:
        """Gradients of the loss; returns what the whole batch came to."""
        self._backward_of(computed.loss)
        return computed

    def _weight(self, batch: Any, samples: int) -> Any:
        """What the loss of the step's batch counts."""
        return self.parts.weigh(batch, samples)

    def _clip_unscaled(self) -> None:
        if self.scaler is not None and self._clips:
            self.scaler.unscale_(self.optimizer)
        self.clip(self._trainable)

    def _backward_of(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self, parameters: list[Tensor]) -> None:
        """Clips their gradients as the Task says."""
        task = self.parts.task
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, task.clip_norm)
        if task.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, task.clip_value)

    def update_average(self, averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Moves averages towards the values, in place."""
        self._average(list(averages), list(values), None)

    def restore_average(self, average: dict[str, Tensor]) -> None:
        """Goes to averages by parameter name, of the whole model.

        Raises:
            CheckpointError: they belong to another model.
        """
        copy_into(self.average, average, "averaged parameter")

    @property
    def holder(self) -> nn.Module:
        """The module whose parameters the optimizer updates; only of towers it is another than the model."""
        return self.parts.model

    def optimizer_state(self, *, lent: bool = False) -> dict[str, Any]:
        """The optimizer's state by qualified parameter name, on the CPU: copies, unless `lent`."""
        found = capture_optimizer(self.optimizer, self.holder, lent=lent)
        return found | {"switched": True} if self.switched else found

    def objects(self) -> dict[str, Any]:
        """What this step alone holds, whose attributes training may change."""
        loss = self.parts.task.loss
        found = {"model": self.parts.model, "optimizer": self.optimizer, "scheduler": schedule_functions(self.schedule)}
        return found | ({"loss": loss} if isinstance(loss, nn.Module) else {})

    def saved_tensors(self) -> set[int]:
        """The `id`s of tensors that State has by other names than by an attribute's."""
        loss = self.parts.task.loss
        modules = [self.parts.model, *([loss] if isinstance(loss, nn.Module) else [])]
        own = [value for module in modules for value in (*module.parameters(), *module.buffers())]
        kept = [value for _, value in tree_leaves([list(self.optimizer.state.values()), self.average, self.outer])]
        return {id(value) for value in (*own, *self._trainable, *kept) if isinstance(value, Tensor)}

    def trainable(self) -> tuple[bool, ...]:
        """`requires_grad` of each of the model's parameters."""
        return tuple(value.requires_grad for value in self.parts.model.parameters())

    def sync_ranks(self) -> None:
        """Brings ranks together that have gone ways of their own; all of them call it at the same places."""

    def totals(self) -> dict[str, Any]:
        """The sums over the epoch so far, of all ranks, which call it together."""
        return self.sums

    def full_model(self) -> AbstractContextManager[None]:
        """The model as a whole, to compute something else with; only ranks may have it in shards."""
        return nullcontext()

    def full_parameters(self) -> AbstractContextManager[None]:
        """All parameters with memory of their own, to read them or to write them."""
        return nullcontext()

    def gather_state(self, state: State) -> State:
        """The whole State, of which ranks may have a part each."""
        return state

    def evaluation_model(self, batch: Any, samples: int) -> StepResult | None:
        """The forward pass of an evaluation; None where another rank has what came of it."""
        return self.parts.task.compute(self.parts.model, batch)

    def warm_up(self, batch: Any, samples: int) -> None:
        """Trains on such a batch as often as it takes to compile or record what follows; here there is nothing to do."""

    def on_state_restored(self) -> None:
        """Notes that a State was restored, and tensors of the optimizer's state replaced."""

    def invalidate_bindings(self) -> None:
        """Notes that callbacks may have put other tensors, or other memory, in the step's place, or added some."""
        self._list_parameters()
        if self.parts.plan.parallel != "none":
            check_trainable(self.parts, self._as_built)

    def _list_parameters(self) -> None:
        named = dict(self.parts.model.named_parameters())
        self._trainable = [value for group in self.optimizer.param_groups for value in group["params"]]
        self._filled = list(named.values())  # frozen ones, too, which a callback may have thawed
        self._averaged = [named[name] for name in self.average]

    def schedule_recheck(self) -> None:
        """Has a compiled step see, before the next batch, whether it still does what was compiled."""

    def run_eagerly(self) -> None:
        """From now on, operation by operation, so that hooks of modules see what happens."""

    def step_schedule(self) -> None:
        """Steps the schedulers that step by step."""
        if self.schedule is not None and self._each_step:
            for schedule in schedules_of(self.schedule):
                if not isinstance(schedule, ReduceLROnPlateau):
                    schedule.step()

    def _clear_gradients(self) -> None:
        """Of all that backward fills, whether the optimizer holds it or not; torch's `zero_grad` takes 14 us more."""
        if self._clears_itself:
            self.optimizer.zero_grad()
        for value in self._filled:
            value.grad = None

    def _compute(self, batch: Any) -> StepResult:
        return self.parts.compute(self.parts.model, batch)

    def _compute_first(self, batch: Any) -> StepResult:
        """The first forward pass: what would train, but on something wrong, is refused."""
        with check_losses(self.parts, batch):
            computed = self._compute(batch)
        if isinstance(computed, YieldedResult):
            raise single_optimizer_error()
        check_loss(computed.loss)
        self._checked = True
        parts = self.parts
        if parts.world.is_single and computed.output is not None:
            doubt = check_loss_sum(parts.task, computed.output, batch[-1], parts.device)
            parts.say(doubt) if doubt else None
        return computed

    def _closure_step(self, batch: Any, samples: int, step: int) -> StepResult:
        """For optimizers such as LBFGS, which ask for the loss several times; each time the draws are the same."""
        first: list[StepResult] = []

        def closure() -> Tensor:
            computed = self._backward(batch, samples, step)
            first.append(computed)
            return computed.loss

        self.optimizer.step(closure)  # type: ignore[arg-type]
        return first[0]

    def _add(self, loss: Tensor, scalars: dict[str, Tensor], weight: Any) -> None:
        sums, wide = self.sums, self.sums["loss"].dtype
        if isinstance(weight, Tensor):
            sums["loss"] += weight_mean(loss.to(wide), weight)
        else:
            sums["loss"].add_(loss, alpha=weight)
        sums["weight"] += weight
        if scalars and not self._has_said_means:
            self._has_said_means = True
            report_means(self.parts, scalars)
        for name, value in scalars.items():
            sums[name] = sums.get(name, 0.0) + weight_mean(value.detach().to(wide), weight)

    def reset_sums(self) -> None:
        """Begins the sums of an epoch."""
        device = self.parts.device
        wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.sums = {"loss": torch.zeros((), dtype=wide, device=device), "weight": 0, "samples": 0}

    def end_epoch(self, figure: float | None) -> None:
        """Steps the schedulers that step by epoch; `figure` is the monitored one, which plateau schedulers watch."""
        for schedule in schedules_of(self.schedule):
            if isinstance(schedule, ReduceLROnPlateau):
                if figure is None:
                    raise TaskError(
                        "end_epoch() without a figure, and the schedule is a ReduceLROnPlateau",
                        expected="the figure that it watches",
                        fix="call end_epoch(loss)",
                    )
                schedule.step(figure)
            elif not self._each_step:
                schedule.step()
        self.reset_sums()

    @property
    def graph(self) -> GraphModule | None:
        """What was captured of it; None where it runs operation by operation."""
        return None

    @property
    def _clips(self) -> bool:
        return self.parts.task.clip_norm is not None or self.parts.task.clip_value is not None

    @property
    def _each_step(self) -> bool:
        """Whether a scheduler steps by step."""
        by_epoch = all(isinstance(one, ReduceLROnPlateau) for one in schedules_of(self.schedule))
        return self.parts.task.schedule_every == "step" and not by_epoch

    def _check_ownership(self) -> None:
        own = {id(value) for value in self.holder.parameters()}
        if any(id(value) not in own for value in self._trainable):
            raise TaskError(
                "the optimizer holds a parameter that is not the model's",
                expected="parameters of the model alone",
                fix="make it part of the module that the model factory returns, and load weights without assign=True",
            )


WEIGHT_SUMS = "weight of "
"""In the name of a sum: what the batches counted that had the figure named after it, where some have not."""


def epoch_means(sums: Mapping[str, float]) -> dict[str, float]:
    """The epoch's loss and further figures: each the mean over the batches that had it."""
    whole = sums["weight"] or 1.0
    return {
        name: value / (sums.get(WEIGHT_SUMS + name, whole) or 1.0)
        for name, value in sums.items()
        if name not in ("weight", "samples") and not name.startswith(WEIGHT_SUMS)
    }


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` can't be called without a closure, as LBFGS's can't."""
    step = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
