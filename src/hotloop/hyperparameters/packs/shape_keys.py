"""Which trials can share a pack: the shape of a Task's network, and the reasons against a pack."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hotloop.core.task_parts.optimizers import NamedOptimizers
from hotloop.data.sources import Stream
from hotloop.lowering.eager_step import needs_closure
from hotloop.task import Task

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_HIDDEN = {*vars(nn.Module())}
"""Attributes of all modules, which say nothing about the computation."""


def pack_shape(task: Task) -> str:
    """Returns a hash of what the trials of a pack must have in common: all but the numbers of the optimizer, and seeds.

    Raises:
        TaskError: the model or the optimizer can't be built.
    """
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    tensors = [
        [name, list(value.shape), str(value.dtype), value.requires_grad]
        for name, value in (*model.named_parameters(), *model.named_buffers())
    ]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    seed = task.seed if _draws(model) else None  # equal seeds draw equal numbers
    rest = [type(optimizer).__qualname__, groups, task.batch_size, task.drop_last, task.shuffle, seed]
    text = json.dumps([tensors, module_settings(model), rest])
    return hashlib.sha256(text.encode()).hexdigest()


def module_settings(module: nn.Module) -> list[Any]:
    """Returns the class and the settings of each module as text; tensors by their values."""
    return [
        [
            name,
            type(part).__qualname__,
            {key: _as_text(value) for key, value in sorted(vars(part).items()) if key not in _HIDDEN},
        ]
        for name, part in module.named_modules()
    ]


def same_loss(tasks: Sequence[Task]) -> bool:
    """Returns whether one loss serves all trials: the loss of each has the same settings and tensors."""
    return len({json.dumps(_loss_settings(task.loss if task.step is None else task.step)) for task in tasks}) == 1


def _loss_settings(loss: Any) -> Any:
    if isinstance(loss, nn.Module):
        return [module_settings(loss), [[name, value.tolist()] for name, value in loss.state_dict().items()]]
    cells = [_as_text(cell.cell_contents) for cell in getattr(loss, "__closure__", None) or ()]
    return [_as_text(loss), _as_text(getattr(loss, "__defaults__", None)), cells]


def _as_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist())
    return getattr(value, "__qualname__", "") or _ADDRESS.sub("", repr(value))


def _draws(model: nn.Module) -> bool:
    return any(isinstance(part, _DropoutNd) and part.p > 0 for part in model.modules())


def reason_against_pack(task: Task) -> str:
    """Returns why a Task's trial can't be packed; empty if a pack may be tried."""
    if task.callbacks:
        return "the Task has callbacks, which may change the model"
    if task.loggers:
        return "the Task has loggers, which record one run at a time"
    if isinstance(task.roles.train, Stream) or task.roles.order is None:
        return "the data is a stream with an order of its own"
    model = task.build_model()
    for name, part in model.named_modules():
        if isinstance(part, nn.RNNBase):
            return f"vmap can't vectorize the fused kernel of {name!r} ({type(part).__name__})"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{name!r} is a ScriptModule, whose tensors can't be replaced"
        if getattr(part, "sparse", False):
            return f"{name!r} has sparse gradients"
    optimizer = task.build_optimizer(model)
    if isinstance(optimizer, NamedOptimizers):
        return "the Task has several optimizers"
    if needs_closure(optimizer):
        return f"{type(optimizer).__name__} evaluates the loss several times in a step"
    return ""
