"""What tells one Task from another of the same sizes: all that its speed or a proof may depend on, as the built Task shows it.

So a task file that takes its layers from a configuration file, or its optimizer from an environment variable, is another
Task under another configuration. The seed is no part of it: neither speed nor proof depends on it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.data.roles import Roles
from hotloop.data.tree import tensors
from hotloop.named_optimizers import members_of
from hotloop.sources import versions_of
from hotloop.task import Task

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
            _of_optimizer(optimizer),
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
    plain = {name: value for name, value in shown.items() if name not in _NEITHER and _is_plain(value)}
    return [_named(type(module)), said, plain]


def _of_optimizer(optimizer: Optimizer) -> list[Any]:
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


def _is_plain(value: Any) -> bool:
    """Whether JSON has it."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(of_it) for name, of_it in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    """A setting as JSON has it; a tensor of one number is this number, and what else JSON hasn't is its class."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else _of_tensor("", value)
    return value if _is_plain(value) else _named(type(value))
