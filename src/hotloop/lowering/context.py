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

from hotloop.core.feasibility.rank_plans import JOINT
from hotloop.core.number_formats import Switches
from hotloop.core.reporter import SILENT, During, Say
from hotloop.core.state import put_values
from hotloop.core.task_parts.keras import is_built
from hotloop.core.task_parts.memory_layout import check_memory
from hotloop.core.task_parts.module_modes import evaluation_mode, note_of_modes, set_training, stays_in_eval
from hotloop.data.batch_tree import inputs_of, tensors
from hotloop.data.feeds.feed import peek
from hotloop.data.sources import Table
from hotloop.data.splits import Roles, check_labels
from hotloop.distributed.comm_stats import Meter
from hotloop.distributed.world import ALONE, World
from hotloop.errors import DataError, TaskError, calling, kind
from hotloop.lowering.losses.loss_copy import copied_loss
from hotloop.lowering.object_state.attributes import hand_on, unchanged
from hotloop.plan import Plan
from hotloop.task import Computed, Task, forward


@dataclass(frozen=True)
class Ingredients:
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
    roles: Roles
    device: torch.device
    model: nn.Module
    weigh: Callable[[Any, int], Any]
    compute: Callable[[nn.Module, Any], Computed]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scaled: bool = False
    around: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    switches: Switches = field(default_factory=dict)
    say: Say = lambda line: None
    during: During = SILENT
    world: World = ALONE
    meter: Meter = field(default_factory=Meter)
    notes: tuple[str, ...] = ()
    elsewhere: tuple[torch.device, ...] = ()
    in_eval: frozenset[str] = frozenset()
    trial: torch.optim.Optimizer | None = None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that the step computes on, the plan's first."""
        return (self.device, *self.elsewhere)

    @contextmanager
    def on_copied_loss(self) -> Iterator[Ingredients]:
        """The same, to try something: what the loss counts or stores meanwhile is a copy's, or is put back.

        Raises:
            NotCopied: a part of the loss can't be copied.
        """
        task = self.task
        if self.compute == task.compute and task.loss is not None:
            task = replace(task, loss=copied_loss(task.loss))
            vars(task)["roles"] = self.roles
            weigh = self.weigh if self.weigh is _samples else task.weight_of
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
    def relayed(self) -> bool:
        """Whether each batch goes from rank to rank, of which the last has what comes of it."""
        return self.plan.parallel == "stages"

    @property
    def joint(self) -> World:
        """The ranks that compute each batch together, since each has a part of the model: then they must all go on with
        it, or none; this process alone where each has the whole model."""
        return self.world if self.plan.parallel in JOINT else ALONE

    @property
    def dealt(self) -> World:
        """The ranks among which the batches of an evaluation are dealt: those that have the whole model."""
        return ALONE if self.plan.parallel in JOINT else self.world

    @classmethod
    def of(cls, task: Task, plan: Plan) -> Ingredients:
        """The Task as it stands: eager, on the CPU."""
        roles = task.roles
        _check_loss(task)
        model = built_model(task)
        check_memory(model)
        if isinstance(task.loss, nn.Module):
            check_memory(task.loss, "loss")
        _check_output(task, roles, model)
        note, in_eval = note_of_modes(model), stays_in_eval(model)
        set_training(model, in_eval)
        weigh = _weigher(task, roles)
        device, world = torch.device("cpu"), World.of(plan)
        whole = (task, plan, roles, device, model, weigh, task.compute, task.build_optimizer)
        return cls(*whole, world=world, notes=(note,) if note else (), in_eval=in_eval)


def built_model(task: Task) -> nn.Module:
    """A new model on the CPU with all its parameters; those of lazy modules come into being on a first batch."""
    model = task.build_model()
    if _unbuilt(model):
        _run_once(task, model, peek(task.roles))
    return model


def placed(
    parts: Ingredients, device: torch.device, move: Callable[[nn.Module], nn.Module] | None = None
) -> Ingredients:
    """Model and loss moved to `device`; the loss is copied, since it may have buffers that training changes.

    Args:
        move: how the model is moved, if parts of it go elsewhere.
    """
    task = parts.task
    if parts.relayed:  # each rank moves what it holds, once it is known
        return replace(parts, device=device)
    if isinstance(task.loss, nn.Module):
        task = replace(task, loss=copy.deepcopy(task.loss).to(device))
        vars(task)["roles"] = parts.roles
        hand_on(parts.task, task)
    weigh = _samples if parts.weigh is _samples else task.weight_of  # with the class weights on the device
    model = parts.model.to(device) if move is None else move(parts.model)
    return replace(parts, task=task, device=device, model=model, weigh=weigh, compute=task.compute)


def _unbuilt(model: nn.Module) -> bool:
    """Whether parameters come into being only when the model first runs."""
    values = list(model.parameters())
    return any(map(is_lazy, values)) or not values or not all(map(is_built, model.modules()))


def _run_once(task: Task, model: nn.Module, batch: Any) -> Any:
    """The output for one small batch; buffers are put back, so that nothing has happened."""
    buffers = {name: value.clone() for name, value in model.named_buffers() if not is_lazy(value)}
    with torch.no_grad(), evaluation_mode([model]), unchanged(task):
        try:
            if task.step is not None:
                return calling("the step", task.compute, model, batch)
            return calling("the model", forward, model, inputs_of(batch))
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


def _check_output(task: Task, roles: Roles, model: nn.Module) -> None:
    """For a classification of arrays in memory: every label is one that the model can put out."""
    if not task.objective.cross_entropy or not isinstance(roles.train, Table):
        return
    targets = _targets(roles.train)
    if targets is None or (targets.is_floating_point() and targets.ndim > 1):  # probabilities of classes
        return
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise DataError(
            f"the targets have dtype {str(targets.dtype).removeprefix('torch.')}",
            expected="whole numbers from 0, the classes, for a cross entropy",
            fix="turn them into integers, such as y.astype('int64') or y.long()",
        )
    try:
        output = _run_once(task, model, peek(roles))
    except TaskError:
        # The first step says what is wrong, and where; or nothing is, but that the model takes no batch as small.
        return
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise TaskError(
            f"the model's output for a batch of 2 is {_shape(output)}",
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
        target = _targets(source) if isinstance(source, Table) else None
        if target is not None and not target.is_floating_point():
            check_labels(target, output.shape[1], name, ignore_index=ignored)


def _shape(output: Any) -> str:
    return f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else kind(output)


def _targets(table: Table) -> Tensor | None:
    """The last of its columns, as the loss takes it; None where that is no tensor, or one of another kind of batch."""
    columns = table.columns
    last = columns[-1] if isinstance(columns, tuple | list) and len(columns) > 1 else None
    return last if isinstance(last, Tensor) else None


def counts_samples(parts: Ingredients) -> bool:
    """Whether what a batch's loss counts is the number of its samples, whatever they hold."""
    return parts.weigh is _samples


def _weigher(task: Task, roles: Roles) -> Callable[[Any, int], Any]:
    """`Task.weight_of`, or the plain number of samples where a look at the data shows that none is ignored."""
    plain = task.weight is None and task.objective.class_weights is None
    if plain and isinstance(roles.train, Table):
        target = _targets(roles.train)
        ignored = task.objective.ignore_index
        if target is None or ignored is None or not bool((target == ignored).any()):
            return _samples
    return task.weight_of


def _samples(batch: Any, samples: int) -> int:
    return samples


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all, trainable) numbers of parameters; shared ones count once."""
    values = list(model.parameters())
    return sum(v.numel() for v in values), sum(v.numel() for v in values if v.requires_grad)


def input_shapes(batch: Any) -> list[list[int]]:
    """Shapes of one sample's tensors, without the batch dimension."""
    return [list(tensor.shape[1:]) for tensor in tensors(batch)]
