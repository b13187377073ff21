"""The parts of a step: the model, its loss, its optimizer and an example batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hotloop.core.task_parts.models import copy_model, default_device, restart_names
from hotloop.data.feeds.feed import first_batch
from hotloop.errors import TaskError
from hotloop.task import Parameters, Task

_LARGEST_SAMPLE = 32  # rows of the data that are read for the shapes of a batch

Compute = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class StepParts:
    """The parts of a step before any tensor exists.

    Attributes:
        model: a module or a factory.
        compute: `compute(model, batch)` returns the loss, or a generator of (optimizer's name, loss).
        optimizer: a factory; None for inference without backward and update.
        batch: an example with at least one row.
        clip_norm, clip_value, average: as in a Task.
    """

    model: nn.Module | Callable[[], nn.Module]
    compute: Compute
    optimizer: Callable[[nn.Module], Optimizer] | None
    batch: Any
    clip_norm: float | None = None
    clip_value: float | None = None
    average: float | None = None

    @classmethod
    def from_task(cls, task: Task, batch_size: int) -> StepParts:
        def model() -> nn.Module:
            restart_names()
            return task.model() if not isinstance(task.model, nn.Module) else copy_model(task.model)

        batch = first_batch(task.roles, min(batch_size, _LARGEST_SAMPLE))
        given = task.model if isinstance(task.model, nn.Module) else model
        further = (task.clip_norm, task.clip_value, task.average)
        return cls(given, lambda model, batch: _loss_of_task(task, model, batch), task.build_optimizer, batch, *further)

    @classmethod
    def from_model(
        cls, model: Any, inputs: Any, loss: Callable[[Any, Any], Tensor] | None, optimizer: Any, is_training: bool
    ) -> StepParts:
        def compute(model: nn.Module, batch: Any) -> Tensor:
            if loss is not None:
                *arguments, target = batch
                return loss(_call(model, tuple(arguments)), target)
            return _default_loss(_call(model, batch))

        def build(model: nn.Module) -> Optimizer:
            return (optimizer or torch.optim.Adam)(Parameters(model))

        return cls(model, compute, build if is_training else None, inputs)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _loss_of_task(task: Task, model: nn.Module, batch: Any) -> Any:
    """Returns the loss, or the generator of losses of a step with several optimizers."""
    if task.step is None:
        return task.compute(model, batch).loss
    with default_device(model):
        result = task.step(model, batch)
    return result["loss"] if isinstance(result, Mapping) else result


def _default_loss(output: Any) -> Tensor:
    """Returns the output's own loss, or the sum of the means of its floating tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    means = [leaf.mean() for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not means and torch.is_grad_enabled():
        raise TaskError(
            "the model's output has no tensor with a gradient", expected="one or more", fix="give loss=(output, target)"
        )
    return sum(means[1:], start=means[0]) if means else torch.zeros(())
