"""The state of lowering a Task under a Plan, which each transform of `build.py` replaces by the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop.core.feasibility import JOINT_MODES
from hotloop.core.files.package_use import PackageUse
from hotloop.core.number_formats import Float32Switches
from hotloop.core.records.training import TaskFacts
from hotloop.core.reporter import SILENT, Reporter, SampleProgress, Say
from hotloop.core.state import put_values
from hotloop.core.task_parts.models import (
    check_memory,
    describe_modes,
    evaluation_mode,
    is_built,
    modules_in_eval,
    set_training,
)
from hotloop.data.batch_tree import batch_inputs, tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.data.sources import Table
from hotloop.data.splits import DataSplits, check_labels
from hotloop.distributed.comm_stats import CommMeter
from hotloop.distributed.world import SINGLE_RANK, World
from hotloop.errors import DataError, TaskError, call_user_code, type_name
from hotloop.lowering.losses.loss_copy import copy_loss
from hotloop.lowering.object_state.attributes import pass_initial_values, preserve_attributes
from hotloop.plan import Plan
from hotloop.task import StepResult, Task, forward


@dataclass(frozen=True)
class LoweringContext:
    """Model, objective and data of one Task under one Plan.

    Attributes:
        task: the Task; a loss module is a copy on the device.
        model: the model on the device, except for modules with a placement of their own.
        weigh: `(batch, samples)` -> the weight of the batch's loss.
        compute: `(model, batch)` -> the forward pass and its loss.
        build_optimizer: `model` -> the optimizer.
        scaled: whether the loss is scaled before backward, as fp16 needs.
        around: contexts in which each training step runs.
        switches: torch's settings of the number formats of products during a step.
        reporter: shows lines and the progress of slow operations to the user.
        world: the ranks that share the training.
        meter: measures the time that this rank spends on communication.
        notes: lines for the user about the lowering of the Plan.
        elsewhere: further devices, on which modules of the model are placed.
        in_eval: names of the modules that stay in evaluation mode while the model trains.
        trial_optimizer: an optimizer over stand-ins for the parameters, for inspection; built before the optimizer that
            trains, because a factory may record its last result.
        package: of the compiled step.
        facts: of the Task, if they are known.
    """

    task: Task
    plan: Plan
    splits: DataSplits
    device: torch.device
    model: nn.Module
    weigh: Callable[[Any, int], Any]
    compute: Callable[[nn.Module, Any], StepResult]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scaled: bool = False
    around: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    switches: Float32Switches = field(default_factory=dict)
    reporter: Reporter = SILENT
    world: World = SINGLE_RANK
    meter: CommMeter = field(default_factory=CommMeter)
    notes: tuple[str, ...] = ()
    elsewhere: tuple[torch.device, ...] = ()
    in_eval: frozenset[str] = frozenset()
    trial_optimizer: torch.optim.Optimizer | None = None
    package: PackageUse = field(default_factory=PackageUse)
    facts: TaskFacts | None = None

    @property
    def say(self) -> Say:
        return self.reporter.say

    def during(self, doing: str, counted: bool = True) -> AbstractContextManager[SampleProgress]:
        return self.reporter.during(doing, counted)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the step; the plan's device comes first."""
        return (self.device, *self.elsewhere)

    @contextmanager
    def with_copied_loss(self) -> Iterator[LoweringContext]:
        """Yields a context for a trial step, whose loss is a copy; a loss that can't be replaced gets its buffers back.

        Raises:
            NotCopied: a part of the loss can't be copied.
        """
        task = self.task
        if self.compute == task.compute and task.loss is not None:
            task = replace(task, loss=copy_loss(task.loss))
            vars(task)["roles"] = self.splits
            weigh = self.weigh if self.weigh is _count_samples else task.weight_of
            yield replace(self, task=task, compute=task.compute, weigh=weigh)
            return
        buffers = list(task.loss.buffers()) if isinstance(task.loss, nn.Module) else []
        before = [value.clone() for value in buffers]
        try:
            yield self  # `compute` belongs to the plan, and calls the loss by itself
        finally:
            with torch.no_grad():
                for value, old in zip(buffers, before, strict=True):
                    value.copy_(old)

    @property
    def is_pipelined(self) -> bool:
        """Whether each batch passes from rank to rank, and the last rank has the result."""
        return self.plan.parallel == "stages"

    @property
    def joint_ranks(self) -> World:
        """The ranks that compute each batch together, each with a part of the model: they stop and continue together.
        This process alone if each rank has the whole model.
        """
        return self.world if self.plan.parallel in JOINT_MODES else SINGLE_RANK

    @property
    def evaluation_ranks(self) -> World:
        """The ranks that share the batches of an evaluation: all ranks that have the whole model."""
        return SINGLE_RANK if self.plan.parallel in JOINT_MODES else self.world

    @classmethod
    def from_task(cls, task: Task, plan: Plan) -> LoweringContext:
        """Returns the context before all transforms: eager, on the CPU."""
        roles = task.roles
        _check_loss(task)
        model = build_model(task)
        check_memory(model)
        if isinstance(task.loss, nn.Module):
            check_memory(task.loss, "loss")
        _check_output(task, roles, model)
        note, in_eval = describe_modes(model), modules_in_eval(model)
        set_training(model, in_eval)
        weigh = _make_weight_function(task, roles)
        device, world = torch.device("cpu"), World.from_group(plan)
        fields = (task, plan, roles, device, model, weigh, task.compute, task.build_optimizer)
        return cls(*fields, world=world, notes=(note,) if note else (), in_eval=in_eval)


def build_model(task: Task) -> nn.Module:
    """Returns a new model on the CPU with all its parameters; a first batch creates the parameters of lazy modules."""
    model = task.build_model()
    if _has_lazy_parameters(model):
        _run_once(task, model, first_batch(task.roles))
    return model


def move_to_device(
    parts: LoweringContext, device: torch.device, move: Callable[[nn.Module], nn.Module] | None = None
) -> LoweringContext:
    """Moves model and loss to `device`; the loss is copied, since training may change its buffers.

    Args:
        move: moves the model, if parts of the model have other devices.
    """
    task = parts.task
    if parts.is_pipelined:  # each rank moves its own stage later
        return replace(parts, device=device)
    if isinstance(task.loss, nn.Module):
        task = replace(task, loss=copy.deepcopy(task.loss).to(device))
        vars(task)["roles"] = parts.splits
        pass_initial_values(parts.task, task)
    weigh = _count_samples if parts.weigh is _count_samples else task.weight_of  # with the class weights on the device
    model = parts.model.to(device) if move is None else move(parts.model)
    return replace(parts, task=task, device=device, model=model, weigh=weigh, compute=task.compute)


def _has_lazy_parameters(model: nn.Module) -> bool:
    """Whether the first run of the model creates parameters."""
    values = list(model.parameters())
    return any(map(is_lazy, values)) or not values or not all(map(is_built, model.modules()))


def _run_once(task: Task, model: nn.Module, batch: Any) -> Any:
    """Returns the output for one small batch, and restores the buffers."""
    buffers = {name: value.clone() for name, value in model.named_buffers() if not is_lazy(value)}
    with torch.no_grad(), evaluation_mode([model]), preserve_attributes(task):
        try:
            if task.step is not None:
                return call_user_code("the step", task.compute, model, batch)
            return call_user_code("the model", forward, model, batch_inputs(batch))
        finally:
            for name, value in model.named_buffers():
                if name in buffers:
                    put_values(value, buffers[name])


def _check_loss(task: Task) -> None:
    """Refuses a loss with trainable parameters, which the optimizer never gets."""
    if not isinstance(task.loss, nn.Module):
        return
    learning = [name for name, value in task.loss.named_parameters() if value.requires_grad]
    if learning:
        raise TaskError(
            f"the loss has a trainable parameter {learning[0]!r}, which the optimizer doesn't get",
            expected="a loss without trainable parameters",
            fix="put the loss into the model, and give a step(model, batch) that calls it",
        )


def _check_output(task: Task, roles: DataSplits, model: nn.Module) -> None:
    """Checks that a classification model of arrays in memory has an output for each label."""
    if not task.objective.cross_entropy or not isinstance(roles.train, Table):
        return
    targets = _target_column(roles.train)
    if targets is None or (targets.is_floating_point() and targets.ndim > 1):  # probabilities of classes
        return
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise DataError(
            f"the targets have dtype {str(targets.dtype).removeprefix('torch.')}",
            expected="whole numbers from 0, the classes, for a cross entropy",
            fix="turn them into integers, such as y.astype('int64') or y.long()",
        )
    try:
        output = _run_once(task, model, first_batch(roles))
    except TaskError:
        return  # The first step reports the error and its place. A model that needs larger batches has none.
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise TaskError(
            f"the model's output for a batch of 2 is {_describe_shape(output)}",
            expected="a tensor (batch, classes, ...) for a cross entropy",
            fix="check the model's last layer",
        )
    if (targets.shape[1:]) != output.shape[2:]:
        raise DataError(
            f"the targets of a sample have shape {tuple(targets.shape[1:])} and its outputs {tuple(output.shape[1:])}",
            expected=f"targets of shape {tuple(output.shape[2:])} for a cross entropy",
            fix="reshape the targets, or check the model's last layer",
        )
    ignored = task.objective.ignore_index
    for name, source in (("data", roles.train), ("validation", roles.validation), ("test", roles.raw_test)):
        target = _target_column(source) if isinstance(source, Table) else None
        if target is not None and not target.is_floating_point():
            check_labels(target, output.shape[1], name, ignore_index=ignored)


def _describe_shape(output: Any) -> str:
    return f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type_name(output)


def _target_column(table: Table) -> Tensor | None:
    """Returns the last column, which is the loss's target; None if the table has no such tensor."""
    columns = table.columns
    last = columns[-1] if isinstance(columns, tuple | list) and len(columns) > 1 else None
    return last if isinstance(last, Tensor) else None


def counts_samples(parts: LoweringContext) -> bool:
    """Whether the weight of a batch's loss is always its number of samples."""
    return parts.weigh is _count_samples


def _make_weight_function(task: Task, roles: DataSplits) -> Callable[[Any, int], Any]:
    """Returns `Task.weight_of`, or the number of samples if no target in the data is ignored."""
    plain = task.weight is None and task.objective.class_weights is None
    if plain and isinstance(roles.train, Table):
        target = _target_column(roles.train)
        ignored = task.objective.ignore_index
        if target is None or ignored is None or not bool((target == ignored).any()):
            return _count_samples
    return task.weight_of


def _count_samples(batch: Any, samples: int) -> int:
    return samples


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Returns (all, trainable) numbers of parameters; shared ones count once."""
    values = list(model.parameters())
    return sum(v.numel() for v in values), sum(v.numel() for v in values if v.requires_grad)


def input_shapes(batch: Any) -> list[list[int]]:
    """Returns the shapes of one sample's tensors, without the batch dimension."""
    return [list(tensor.shape[1:]) for tensor in tree_tensors(batch)]
