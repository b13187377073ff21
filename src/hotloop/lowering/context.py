"""What a step is made of, before and after the transforms of `build.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hotloop.core.feasibility.rank_plans import JOINT_MODES
from hotloop.core.number_formats import Float32Switches
from hotloop.core.reporter import SILENT, ProgressReporter, Report
from hotloop.core.state import put_values
from hotloop.core.task_parts.keras import is_built
from hotloop.core.task_parts.memory_layout import check_memory
from hotloop.core.task_parts.module_modes import describe_modes, evaluation_mode, modules_in_eval, set_training
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
        task: with a loss of its own on the device, if the loss is a module.
        model: on the device, but for modules that are placed elsewhere.
        weigh: `(batch, samples)` -> what the batch's loss counts.
        compute: `(model, batch)` -> the forward pass and its loss.
        build_optimizer: `model` -> the optimizer.
        scaled: whether the loss is scaled before backward, as fp16 needs.
        around: contexts that each training step runs in.
        switches: torch's, of the format in which products are computed, as the step has them.
        say: shows a line to the user at once, while something takes long.
        during: shows that it does, and how far it is.
        world: the ranks that share the training.
        meter: of the time that this rank spends on the others.
        notes: lines that the user should read about how the Plan was lowered.
        elsewhere: further devices, where modules of the model are placed.
        trial: an optimizer over stand-ins for the parameters, to be looked at; made before the one that trains, so that the
            factory's last call is for that.
        in_eval: names of the modules that stay in evaluation mode while the model trains.
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
    say: Report = lambda line: None
    during: ProgressReporter = SILENT
    world: World = SINGLE_RANK
    meter: CommMeter = field(default_factory=CommMeter)
    notes: tuple[str, ...] = ()
    elsewhere: tuple[torch.device, ...] = ()
    in_eval: frozenset[str] = frozenset()
    trial_optimizer: torch.optim.Optimizer | None = None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that the step computes on, the plan's first."""
        return (self.device, *self.elsewhere)

    @contextmanager
    def with_copied_loss(self) -> Iterator[LoweringContext]:
        """The same, to try something: what the loss counts or stores meanwhile is a copy's, or is put back.

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
            yield self  # the plan computes by a function of its own, which calls the loss itself
        finally:
            with torch.no_grad():
                for value, then in zip(buffers, before, strict=True):
                    value.copy_(then)

    @property
    def is_pipelined(self) -> bool:
        """Whether each batch goes from rank to rank, of which the last has what comes of it."""
        return self.plan.parallel == "stages"

    @property
    def is_joint(self) -> World:
        """The ranks that compute each batch together, since each has a part of the model: then they must all go on with
        it, or none; this process alone where each has the whole model."""
        return self.world if self.plan.parallel in JOINT_MODES else SINGLE_RANK

    @property
    def is_dealt(self) -> World:
        """The ranks among which the batches of an evaluation are dealt: those that have the whole model."""
        return SINGLE_RANK if self.plan.parallel in JOINT_MODES else self.world

    @classmethod
    def from_task(cls, task: Task, plan: Plan) -> LoweringContext:
        """The Task as it stands: eager, on the CPU."""
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
        whole = (task, plan, roles, device, model, weigh, task.compute, task.build_optimizer)
        return cls(*whole, world=world, notes=(note,) if note else (), in_eval=in_eval)


def build_model(task: Task) -> nn.Module:
    """A new model on the CPU with all its parameters; those of lazy modules come into being on a first batch."""
    model = task.build_model()
    if _has_lazy_parameters(model):
        _run_once(task, model, first_batch(task.roles))
    return model


def move_to_device(
    parts: LoweringContext, device: torch.device, move: Callable[[nn.Module], nn.Module] | None = None
) -> LoweringContext:
    """Model and loss moved to `device`; the loss is copied, since it may have buffers that training changes.

    Args:
        move: how the model is moved, if parts of it go elsewhere.
    """
    task = parts.task
    if parts.is_pipelined:  # each rank moves what it holds, once it is known
        return replace(parts, device=device)
    if isinstance(task.loss, nn.Module):
        task = replace(task, loss=copy.deepcopy(task.loss).to(device))
        vars(task)["roles"] = parts.splits
        pass_initial_values(parts.task, task)
    weigh = _count_samples if parts.weigh is _count_samples else task.weight_of  # with the class weights on the device
    model = parts.model.to(device) if move is None else move(parts.model)
    return replace(parts, task=task, device=device, model=model, weigh=weigh, compute=task.compute)


def _has_lazy_parameters(model: nn.Module) -> bool:
    """Whether parameters come into being only when the model first runs."""
    values = list(model.parameters())
    return any(map(is_lazy, values)) or not values or not all(map(is_built, model.modules()))


def _run_once(task: Task, model: nn.Module, batch: Any) -> Any:
    """The output for one small batch; buffers are put back, so that nothing has happened."""
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
    """A loss with weights to learn would never learn them."""
    if not isinstance(task.loss, nn.Module):
        return
    learning = [name for name, value in task.loss.named_parameters() if value.requires_grad]
    if learning:
        raise TaskError(
            f"the loss has a trainable parameter {learning[0]!r}, which the optimizer doesn't get",
            expected="all that is trained in the model",
            fix="put the loss into the model, and give a step(model, batch) that calls it",
        )


def _check_output(task: Task, roles: DataSplits, model: nn.Module) -> None:
    """For a classification of arrays in memory: every label is one that the model can put out."""
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
        # The first step says what is wrong, and where; or nothing is, but that the model takes no batch as small.
        return
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
    """The last of its columns, as the loss takes it; None where that is no tensor, or one of another kind of batch."""
    columns = table.columns
    last = columns[-1] if isinstance(columns, tuple | list) and len(columns) > 1 else None
    return last if isinstance(last, Tensor) else None


def counts_samples(parts: LoweringContext) -> bool:
    """Whether what a batch's loss counts is the number of its samples, whatever they hold."""
    return parts.weigh is _count_samples


def _make_weight_function(task: Task, roles: DataSplits) -> Callable[[Any, int], Any]:
    """`Task.weight_of`, or the plain number of samples where a look at the data shows that none is ignored."""
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
    """(all, trainable) numbers of parameters; shared ones count once."""
    values = list(model.parameters())
    return sum(v.numel() for v in values), sum(v.numel() for v in values if v.requires_grad)


def input_shapes(batch: Any) -> list[list[int]]:
    """Shapes of one sample's tensors, without the batch dimension."""
    return [list(tensor.shape[1:]) for tensor in tree_tensors(batch)]
