"""The eager training step: reseed, forward, backward, clip, update, schedule, average, sums."""

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

from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import StepSeeds, seed_for
from hotloop.core.state import State, copy_into, tree_leaves
from hotloop.core.task_parts.losses import weight_mean
from hotloop.core.task_parts.models import switchable_optimizers
from hotloop.core.task_parts.optimizers import capture_optimizer, has_own_state_dict, inner_optimizers
from hotloop.core.task_parts.schedules import schedules_of
from hotloop.distributed.world import World
from hotloop.errors import PlanError, TaskError
from hotloop.lowering.checks.first_step import check_clipping, check_loss, check_losses, report_means
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.losses.loss_copy import check_loss_sum
from hotloop.lowering.object_state.attributes import schedule_functions
from hotloop.lowering.transforms.accumulation import accumulate
from hotloop.lowering.transforms.optimizer import flush_subnormals
from hotloop.task import StepResult, Task, YieldedResult, single_optimizer_error


class EagerStep:
    """One training step, operation by operation; the base class of all steps.

    Attributes:
        optimizer, schedule: results of the Task's factories.
        switched: the optimizer, or its inner optimizers, if `train()` and `eval()` switch the weights.
        draws: seeds the generators before each step.
        owned: the random generators of model, loss, step, optimizer and schedule.
        steps_run: number of steps that the compiled program ran; None without one.
        recheck_s: seconds of one recheck of the captured step; 0 without a capture.
        row_arrays: the arrays whose unchanged rows are the batches of `run`; None for other batches.
        cuts_batches: whether `run` takes a `RowBatches`, and cuts several batches at once.
        draws_by_words: whether random zeros and ones differ from the baseline's; see `WordDrawMode`.
        inexact: lines about why a resumed run differs from an uninterrupted one.
        scaler: decides the scale of fp16's loss; None in other precisions.
        scale: the scale of a compiled step's loss, 0-dim, on the device; None in other precisions.
        average: exponential averages of this rank's parameters by name; empty if the Task has none.
        sums: sums over the epoch so far: `loss` and further scalars, each weighted (0-dim, on the device), `weight` and
            `samples`.
    """

    steps_run: int | None = None
    recheck_s = 0.0
    draws_by_words = False
    inexact: tuple[str, ...] = ()
    row_arrays: Any = None
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
        """Runs a step on each batch, starting with step number `step`; yields (steps, samples) after each call."""
        for batch, samples in batches:
            self(batch, samples, step)
            step += 1
            yield 1, samples

    def _step_draws(self, *devices: torch.device, rank: int = 0) -> StepSeeds:
        return StepSeeds(self.parts.task.seed, *devices, rank=rank, further=self.owned.seed)

    def begin_span(self) -> None:
        """Prepares the generators for the next steps; the caller may have changed the generators before."""
        self.draws.begin_span()
        self.owned.refresh()

    def _run(self, batch: Any, samples: int, step: int) -> StepResult:
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
        """Computes gradients of the loss; returns the result for the whole batch."""
        self._backward_of(computed.loss)
        return computed

    def _weight(self, batch: Any, samples: int) -> Any:
        return self.parts.weigh(batch, samples)

    def _clip_unscaled(self) -> None:
        if self.scaler is not None and self._clips:
            self.scaler.unscale_(self.optimizer)
        self.clip(self._trainable)

    def _backward_of(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self, parameters: list[Tensor]) -> None:
        """Clips the gradients in place by the Task's `clip_norm` and `clip_value`."""
        task = self.parts.task
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, task.clip_norm)
        if task.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, task.clip_value)

    def update_average(self, averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Moves averages towards the values, in place."""
        self._average(list(averages), list(values), None)

    def restore_average(self, average: dict[str, Tensor]) -> None:
        """Restores averages by parameter name, of the whole model.

        Raises:
            CheckpointError: the averages belong to another model.
        """
        copy_into(self.average, average, "averaged parameter")

    @property
    def holder(self) -> nn.Module:
        """The module whose parameters the optimizer updates: the model, except with parallel=towers."""
        return self.parts.model

    def optimizer_state(self, *, lent: bool = False) -> dict[str, Any]:
        """Returns the optimizer's state by qualified parameter name, on the CPU: copies, unless `lent`."""
        state = capture_optimizer(self.optimizer, self.holder, lent=lent)
        return state | {"switched": True} if self.switched else state

    def objects(self) -> dict[str, Any]:
        """Returns the step's objects whose attributes training may change, by name."""
        loss = self.parts.task.loss
        known = {"model": self.parts.model, "optimizer": self.optimizer, "scheduler": schedule_functions(self.schedule)}
        return known | ({"loss": loss} if isinstance(loss, nn.Module) else {})

    def saved_tensors(self) -> set[int]:
        """Returns the `id`s of tensors that State contains under other names than an attribute's."""
        loss = self.parts.task.loss
        modules = [self.parts.model, *([loss] if isinstance(loss, nn.Module) else [])]
        named = [value for module in modules for value in (*module.parameters(), *module.buffers())]
        state = [value for _, value in tree_leaves([list(self.optimizer.state.values()), self.average])]
        return {id(value) for value in (*named, *self._trainable, *state) if isinstance(value, Tensor)}

    def trainable(self) -> tuple[bool, ...]:
        """Returns `requires_grad` of each of the model's parameters."""
        return tuple(value.requires_grad for value in self.parts.model.parameters())

    def sync_ranks(self) -> None:
        """Makes the state of all ranks equal; a collective call."""

    def totals(self) -> dict[str, Any]:
        """Returns the sums over the epoch so far, of all ranks; a collective call."""
        return self.sums

    def full_model(self) -> AbstractContextManager[None]:
        """Makes a sharded model whole meanwhile, for other computations."""
        return nullcontext()

    def full_parameters(self) -> AbstractContextManager[None]:
        """Gives all parameters memory of their own meanwhile, for reading and writing."""
        return nullcontext()

    def gather_state(self, state: State) -> State:
        """Returns the whole State from the ranks' parts."""
        return state

    def evaluation_model(self, batch: Any, samples: int) -> StepResult | None:
        """Returns the forward pass of an evaluation; None if another rank has the result."""
        return self.parts.task.compute(self.parts.model, batch)

    def warm_up(self, batch: Any, samples: int) -> None:
        """Trains on this batch until later steps are compiled or recorded; an eager step needs nothing."""

    def on_state_restored(self) -> None:
        """Called after a State was restored, which replaces tensors of the optimizer's state."""

    def invalidate_bindings(self) -> None:
        """Called after callbacks, which may have replaced or added tensors, or moved their memory."""
        self._list_parameters()
        if self.parts.plan.parallel != "none":
            check_trainable(self.parts, self._as_built)

    def _list_parameters(self) -> None:
        named = dict(self.parts.model.named_parameters())
        self._trainable = [value for group in self.optimizer.param_groups for value in group["params"]]
        self._filled = list(named.values())  # also frozen parameters: a callback may unfreeze them
        self._averaged = [named[name] for name in self.average]

    def schedule_recheck(self) -> None:
        """Makes a compiled step check before the next batch that a new capture equals the compiled one."""

    def run_eagerly(self) -> None:
        """Disables compiled programs from now on, so that module hooks are called."""

    def step_schedule(self) -> None:
        """Steps the schedulers that step after each training step."""
        if self.schedule is not None and self._each_step:
            for schedule in schedules_of(self.schedule):
                if not isinstance(schedule, ReduceLROnPlateau):
                    schedule.step()

    def _clear_gradients(self) -> None:
        """Clears the gradients that backward writes, also of frozen parameters; `zero_grad` takes 14 us more."""
        if self._clears_itself:
            self.optimizer.zero_grad()
        for value in self._filled:
            value.grad = None

    def _compute(self, batch: Any) -> StepResult:
        return self.parts.compute(self.parts.model, batch)

    def _compute_first(self, batch: Any) -> StepResult:
        """Computes the first forward pass, and refuses mistakes that would train without an error."""
        with check_losses(self.parts, batch):
            computed = self._compute(batch)
        if isinstance(computed, YieldedResult):
            raise single_optimizer_error()
        check_loss(computed.loss)
        self._checked = True
        parts = self.parts
        if not parts.world.is_single or computed.output is None:
            return computed
        if doubt := check_loss_sum(parts.task, computed.output, batch[-1], parts.device):
            parts.say(doubt)
        return computed

    def _closure_step(self, batch: Any, samples: int, step: int) -> StepResult:
        """Runs an optimizer such as LBFGS, which evaluates the loss several times; the random numbers are the same."""
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
        """Resets the sums at the start of an epoch."""
        device = self.parts.device
        wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        self.sums = {"loss": torch.zeros((), dtype=wide, device=device), "weight": 0, "samples": 0}

    def end_epoch(self, figure: float | None) -> None:
        """Steps the schedulers that step after each epoch; `figure` is the monitored figure for plateau schedulers."""
        for schedule in schedules_of(self.schedule):
            if isinstance(schedule, ReduceLROnPlateau):
                if figure is None:
                    raise TaskError(
                        "end_epoch() without a figure, and the schedule is a ReduceLROnPlateau",
                        expected="the figure that the schedule monitors",
                        fix="call end_epoch(loss)",
                    )
                schedule.step(figure)
            elif not self._each_step:
                schedule.step()
        self.reset_sums()

    @property
    def graph(self) -> GraphModule | None:
        """The captured graph; None without a capture."""
        return None

    @property
    def _clips(self) -> bool:
        return self.parts.task.clip_norm is not None or self.parts.task.clip_value is not None

    @property
    def _each_step(self) -> bool:
        """Whether a scheduler steps after each training step."""
        by_epoch = all(isinstance(schedule, ReduceLROnPlateau) for schedule in schedules_of(self.schedule))
        return self.parts.task.schedule_every == "step" and not by_epoch

    def _check_ownership(self) -> None:
        known = {id(value) for value in self.holder.parameters()}
        if any(id(value) not in known for value in self._trainable):
            raise TaskError(
                "the optimizer holds a parameter that is not the model's",
                expected="parameters of the model alone",
                fix="make it part of the module that the model factory returns, and load weights without assign=True",
            )


WEIGHT_SUMS = "weight of "
"""Prefix of a sum's name: the weight of the batches that had the figure of that name, if some lack the figure."""


def epoch_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the epoch's loss and further figures, each the mean over the batches that had the figure."""
    whole = sums["weight"] or 1.0
    return {
        name: value / (sums.get(WEIGHT_SUMS + name, whole) or 1.0)
        for name, value in sums.items()
        if name not in ("weight", "samples") and not name.startswith(WEIGHT_SUMS)
    }


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` requires a closure, as LBFGS's does."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_NEAREST_OBJECTS = 64
"""Number of objects whose attributes are compared after each span of steps; one comparison takes 0.3 us."""


class StepGenerators:
    """Seeds the generators of model, loss, step, optimizer and schedule from the seed of each step.

    Attributes:
        of_batch: generators of model, loss and step. Each rank draws its own numbers for its rows.
        of_update: generators of optimizer and schedule. All ranks draw the same numbers.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Any, schedule: Any, world: World) -> None:
        self.of_batch = OwnedGenerators(task.owners(model), near=_NEAREST_OBJECTS)
        self.of_update = OwnedGenerators({"optimizer": optimizer, "schedule": schedule}, near=_NEAREST_OBJECTS)
        self._world = world
        self._is_first = True
        self.refresh()

    def refresh(self) -> None:
        self.of_batch.refresh()
        self.of_update.refresh()

    def seed(self, seed: int) -> None:
        rank = self._world.rank
        self.of_batch.seed(seed_for(seed, "rank", rank) if rank else seed)
        self.of_update.seed(seed)

    def find_late(self) -> list[str]:
        """Returns a line for each generator that steps created since the last call of `refresh`."""
        both = (self.of_batch, self.of_update)
        late = [path for owned in both for path in owned.late_finds(thorough=self._is_first)]
        self._is_first = False
        return [
            f"a step makes the random generator {path}: what the first step of each process draws from it doesn't follow "
            "from the seed, so a resumed run may differ"
            for path in late
        ]


_SPLIT_MODES = ("sharded", "towers", "tensor", "stages", "local")
"""Values of `parallel` with which ranks split, move or average the state of single parameters."""


def check_optimizer(parts: LoweringContext, optimizer: torch.optim.Optimizer, *, switches: bool) -> None:
    """Rejects an optimizer whose state or modes the plan or the Task doesn't support.

    Args:
        switches: whether the optimizer has a training and an evaluation mode.

    Raises:
        TaskError: the optimizer and the Task both average the weights.
        PlanError: ranks can't split the optimizer's state.
    """
    name, parallel, average = type(optimizer).__name__, parts.plan.parallel, parts.task.average
    if switches and average is not None:
        raise TaskError(
            f"average={average} with {name}, whose eval() averages weights itself",
            expected="one average of the weights",
            fix="leave average out, or use another optimizer",
        )
    own = switches or has_own_state_dict(optimizer) or inner_optimizers(optimizer)
    if own and parallel in _SPLIT_MODES:
        raise PlanError(
            f"parallel={parallel} with {name}, which has a state_dict or modes of its own, or wraps an optimizer",
            expected="an optimizer whose state belongs to single parameters",
            fix="use parallel=data or none, or another optimizer",
        )


def check_trainable(parts: LoweringContext, as_built: Sequence[bool]) -> None:
    """Raises PlanError if a parameter was frozen or unfrozen after the step was built, as other processes miss the change."""
    named = list(parts.model.named_parameters())
    changed = [name for (name, value), before in zip(named, as_built, strict=True) if value.requires_grad != before]
    if changed:
        raise PlanError(
            f"parallel={parts.plan.parallel}, and {changed[0]!r} was frozen or thawed after the model was built",
            expected="the same parameters to train throughout",
            fix="use parallel=none",
        )
