"""TaskFacts: what is known of a Task without running it for long."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from hotloop.core.files.source_files import versions_of
from hotloop.core.records.training import TaskFacts
from hotloop.core.task_parts.named_optimizers import NamedOptimizers, checked_optimizer, described, members_of
from hotloop.core.task_parts.optimizer_state import inner_optimizers
from hotloop.data.batch_tree import inputs_of, tensors
from hotloop.data.feeds.feed import peek
from hotloop.data.sources import Stream, Table
from hotloop.data.splits import Roles
from hotloop.errors import TaskError, calling
from hotloop.lowering.checks.exactness import inexact_reasons
from hotloop.lowering.context import Ingredients, count_parameters, counts_samples, input_shapes
from hotloop.lowering.eager_step import needs_closure
from hotloop.lowering.object_state.attributes import unchanged
from hotloop.lowering.transforms.optimizer import gapless
from hotloop.task import Parameters, Task

_OPTIONS = ("clip_norm", "clip_value", "average", "schedule_every", "deterministic")

_FUNCTIONS = ("loss", "step", "schedule", "weight", "prepare", "augment", "collate")

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

_NEITHER = {*vars(nn.Module())}  # `training` changes while a Task is looked at, and the others are torch's own


def fingerprint(
    task: Task, model: nn.Module, optimizer: Optimizer, batch: Any, known: Mapping[str, Any], source_digest: str
) -> str:
    """SHA-256 over the sizes that are `known`, the hash of the source, and what the parts show of themselves."""
    text = json.dumps(
        [
            dict(known) | {"order": _arrangement(task.roles)},
            source_digest,
            [str(value.dtype) for value in tensors(batch)],
            [_of_tensor(name, value) for name, value in model.named_parameters()],
            [_of_tensor(name, value) for name, value in model.named_buffers()],
            [[name, *_of_module(module)] for name, module in model.named_modules()],
            _optimizer_settings(optimizer),
            {name: getattr(task, name) for name in _OPTIONS},
            {name: _of_function(getattr(task, name)) for name in _FUNCTIONS},
            versions_of(_packages(model, optimizer)),
        ],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _arrangement(roles: Roles) -> Any:
    """What decides how batches are cut, whatever the seed makes of it."""
    order = None if roles.order is None else {**asdict(roles.order), "seed": 0}
    return [order, roles.held_out]


def _of_tensor(name: str, value: Tensor) -> list[Any]:
    return [name, list(value.shape), str(value.dtype)]


def _of_module(module: nn.Module) -> list[Any]:
    """Its class, what it says of itself, and its settings: attributes that are plain values.

    Private ones as well, where the class is the user's own: a library's may name what differs each time.
    """
    try:
        said = _ADDRESS.sub("", module.extra_repr())
    except Exception:  # the user's own, which nothing else calls
        said = ""
    private = _is_local(type(module).__module__.partition(".")[0])
    shown = {name: value for name, value in vars(module).items() if private or name[0] != "_"}
    plain = {name: value for name, value in shown.items() if name not in _NEITHER and _is_json(value)}
    return [_named(type(module)), said, plain]


def _optimizer_settings(optimizer: Optimizer) -> list[Any]:
    groups = [
        {str(name): _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return [*(_named(type(member)) for member in members_of(optimizer)), groups]


def _of_function(function: Any) -> Any:
    if isinstance(function, nn.Module):
        return [[name, *_of_module(module)] for name, module in function.named_modules()]
    return None if function is None else _named(function if hasattr(function, "__qualname__") else type(function))


def _packages(model: nn.Module, optimizer: Optimizer) -> set[str]:
    kinds = {*map(type, model.modules()), *map(type, members_of(optimizer))}
    return {kind.__module__.partition(".")[0] for kind in kinds}


@cache
def _is_local(package: str) -> bool:
    return not versions_of([package])


def _named(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{thing.__qualname__}"


def _is_json(value: Any) -> bool:
    """Whether JSON has it."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(of_it) for name, of_it in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    """A setting as JSON has it; a tensor of one number is this number, and what else JSON hasn't is its class."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else _of_tensor("", value)
    return value if _is_json(value) else _named(type(value))


_IMAGES = (4, 5)
"""Dimensions of a batch of images or volumes, and of the weights of a convolution over them."""


def facts_of(parts: Ingredients, source_digest: str = "") -> TaskFacts:
    """Facts of the Task that `parts` are of; `source_digest` is the hash of its source, where there is one."""
    roles, model = parts.task.roles, parts.model  # as given, wherever the plan puts them
    with unchanged(parts.task):
        batch = peek(roles)
    parameters, trainable = count_parameters(model)
    known: dict[str, Any] = {
        "parameters": parameters,
        "trainable": trainable,
        "samples": None if isinstance(roles.train, Stream) else len(roles.train),
        "batches": roles.batches,
        "batch_size": roles.batch_size,
        "inputs": input_shapes(batch),
        "data": type(roles.train).__name__,
        "exact": roles.exact,
        "order": roles.digest,
    }
    counted = {"counts_samples": counts_samples(parts)}  # whatever the labels are: it makes another step
    optimizer = parts.trial or trial_optimizer(parts.task, model)
    inexact = inexact_reasons(parts.task, model, optimizer)
    dimensions = {value.ndim for value in model.parameters()}
    return TaskFacts(
        **known | {"exact": roles.exact and not inexact},
        inexact=inexact,
        fingerprint=fingerprint(parts.task, model, optimizer, batch, known | counted, source_digest),
        **_of_optimizer(optimizer, model),
        images=not (dimensions | {value.ndim for value in tensors(inputs_of(batch))}).isdisjoint(_IMAGES),
        convolutions=not dimensions.isdisjoint(_IMAGES),
        has_convolution_layers=not dimensions.isdisjoint(_IMAGES) or _convolves(model),
        normed=normalises(model),
        recurrent=any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()),
        drops=any(map(_drops, model.modules())),
        data_bytes=roles.train.nbytes() if isinstance(roles.train, Table) else None,
        steps=_steps(parts.task, roles),
    )


def normalises(model: nn.Module) -> bool:
    """Whether it has a layer of torch's that normalises over the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _convolves(model: nn.Module) -> bool:
    """Whether a layer of torch's is a convolution."""
    return any(isinstance(module, _ConvNd) for module in model.modules())


def _drops(module: nn.Module) -> bool:
    """Whether it has dropout: of attention and recurrent layers that is a number of theirs."""
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and 0.0 < share < 1.0


def _steps(task: Task, roles: Roles) -> int | None:
    return None if roles.batches is None else roles.batches * task.epochs


def _of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    # A wrapped optimizer may read its groups or not.
    able = () if any(map(inner_optimizers, members_of(optimizer))) else ("foreach", "fused")
    switches = [name for name in able if all(name in group for group in optimizer.param_groups)]
    unfit = _not_fused(model) if "fused" in switches else ""
    known = ["forloop", *switches] if switches else []
    return {
        "optimizer": described(optimizer),
        "optimizers": list(optimizer.members) if isinstance(optimizer, NamedOptimizers) else [],
        "implementations": [name for name in known if name != "fused" or not unfit],
        "one_operation": _is_plain(optimizer),
        "not_fused": unfit,
        "closure": any(map(needs_closure, members_of(optimizer))),
    }


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    more = ("momentum", "weight_decay")
    return type(optimizer) is torch.optim.SGD and not any(
        group[name] for group in optimizer.param_groups for name in more
    )


def _not_fused(model: nn.Module) -> str:
    """Why torch's fused kernels can't update the model; empty if they can.

    They walk through parameters as if there were no gaps, and through gradients that are dense and of real numbers.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            return f"the gradient of {name or 'the model'!r} is sparse"
    for name, value in model.named_parameters():
        if not value.is_floating_point():
            return f"the parameter {name!r} is not of real numbers"
        if value.requires_grad and not gapless(value):
            return f"the parameter {name!r} is a view with gaps in memory, of strides {value.stride()}"
    return ""


def trial_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer to look at, over stand-ins for the parameters: a factory may put hooks on what it is given."""
    try:
        return checked_optimizer(calling("the optimizer factory", task.optimizer, _stand_ins(model)))
    except TaskError:  # it compares them with those of the model
        return task.build_optimizer(model)


def _stand_ins(model: nn.Module) -> Parameters:
    """Like the trainable parameters, but each with the memory of a single number."""
    parameters = Parameters(model)
    parameters.named = {
        name: nn.Parameter(torch.zeros((), dtype=value.dtype).expand(value.shape))
        for name, value in parameters.named.items()
    }
    parameters[:] = parameters.named.values()
    return parameters
