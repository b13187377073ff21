"""Facts of a Task that are known before training, and its fingerprint."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from hotloop.core.files.source_files import installed_versions
from hotloop.core.random.generators import unset_generators
from hotloop.core.records.training import TaskFacts
from hotloop.core.task_parts.models import is_gapless
from hotloop.core.task_parts.optimizers import (
    NamedOptimizers,
    check_optimizer,
    describe_optimizer,
    inner_optimizers,
    member_optimizers,
)
from hotloop.data.batch_tree import batch_inputs, tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.data.seeded_dataset import generator_owners
from hotloop.data.sources import Stream, Table
from hotloop.data.splits import DataSplits
from hotloop.errors import TaskError, call_user_code
from hotloop.lowering.context import LoweringContext, count_parameters, counts_samples, input_shapes
from hotloop.lowering.eager_step import needs_closure
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.task import Parameters, Task

_OPTIONS = ("clip_norm", "clip_value", "average", "schedule_every", "deterministic")

_FUNCTIONS = ("loss", "step", "schedule", "weight", "prepare", "augment", "collate")

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

# `training` changes during an inspection; the others are torch's own
_MODULE_ATTRIBUTES = {*vars(nn.Module())}


def fingerprint(
    task: Task, model: nn.Module, optimizer: Optimizer, batch: Any, known: Mapping[str, Any], source_digest: str
) -> str:
    """Returns a SHA-256 over the `known` sizes, the hash of the source, and the visible settings of the parts."""
    text = json.dumps(
        [
            dict(known) | {"order": _batching_facts(task.roles)},
            source_digest,
            [str(value.dtype) for value in tree_tensors(batch)],
            [_tensor_facts(name, value) for name, value in model.named_parameters()],
            [_tensor_facts(name, value) for name, value in model.named_buffers()],
            [[name, *_module_facts(module)] for name, module in model.named_modules()],
            _optimizer_settings(optimizer),
            {name: getattr(task, name) for name in _OPTIONS},
            {name: _function_facts(getattr(task, name)) for name in _FUNCTIONS},
            installed_versions(_imported_packages(model, optimizer)),
        ],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _batching_facts(roles: DataSplits) -> Any:
    """Returns the settings that decide how batches are cut; the seed has no effect."""
    order = None if roles.order is None else {**asdict(roles.order), "seed": 0}
    return [order, roles.validation_samples]


def _tensor_facts(name: str, value: Tensor) -> list[Any]:
    return [name, list(value.shape), str(value.dtype)]


def _module_facts(module: nn.Module) -> list[Any]:
    """Returns class name, `extra_repr`, and the attributes that are plain values.

    Private attributes count only for the user's own classes: those of a library may differ between processes.
    """
    try:
        text = _ADDRESS.sub("", module.extra_repr())
    except Exception:  # a user's method, which may fail
        text = ""
    has_private = _is_local(type(module).__module__.partition(".")[0])
    visible = {name: value for name, value in vars(module).items() if has_private or name[0] != "_"}
    plain = {name: value for name, value in visible.items() if name not in _MODULE_ATTRIBUTES and _is_json(value)}
    return [_function_name(type(module)), text, plain]


def _optimizer_settings(optimizer: Optimizer) -> list[Any]:
    groups = [
        {str(name): _to_json(value) for name, value in group.items() if name not in ("params", "param_names")}
        | {"params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return [*(_function_name(type(member)) for member in member_optimizers(optimizer)), groups]


def _function_facts(function: Any) -> Any:
    if isinstance(function, nn.Module):
        return [[name, *_module_facts(module)] for name, module in function.named_modules()]
    if function is None:
        return None
    return _function_name(function if hasattr(function, "__qualname__") else type(function))


def _imported_packages(model: nn.Module, optimizer: Optimizer) -> set[str]:
    kinds = {*map(type, model.modules()), *map(type, member_optimizers(optimizer))}
    return {kind.__module__.partition(".")[0] for kind in kinds}


@cache
def _is_local(package: str) -> bool:
    return not installed_versions([package])


def _function_name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{thing.__qualname__}"


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _to_json(value: Any) -> Any:
    """Returns a setting as a JSON value: a tensor of one number as that number, other objects as their class name."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else _tensor_facts("", value)
    return value if _is_json(value) else _function_name(type(value))


_IMAGE_DIMENSIONS = (4, 5)
"""Number of dimensions of a batch of images or volumes, and of the weights of their convolutions."""


def task_facts(parts: LoweringContext, source_digest: str = "") -> TaskFacts:
    """Returns the facts of the Task of `parts`; `source_digest` is the hash of the Task's source, if known."""
    return task_facts_by_digest(parts, [source_digest])[0]


def task_facts_by_digest(parts: LoweringContext, source_digests: Sequence[str]) -> list[TaskFacts]:
    """Returns the facts with the fingerprint of each hash of the Task's source."""
    roles, model = parts.task.roles, parts.model
    with preserve_attributes(parts.task):
        batch = first_batch(roles)
    parameters, trainable = count_parameters(model)
    known: dict[str, Any] = {
        "parameters": parameters,
        "trainable": trainable,
        "samples": None if isinstance(roles.train, Stream) else len(roles.train),
        "batches": roles.batches,
        "batch_size": roles.batch_size,
        "inputs": input_shapes(batch),
        "data": type(roles.train).__name__,
        "exact": roles.is_exact,
        "order": roles.digest,
    }
    counted = {"counts_samples": counts_samples(parts)}  # decides which operations the step has
    optimizer = parts.trial_optimizer or trial_optimizer(parts.task, model)
    inexact = inexact_reasons(parts.task, model, optimizer)
    dimensions = {value.ndim for value in model.parameters()}
    input_dimensions = {value.ndim for value in tree_tensors(batch_inputs(batch))}
    has_image_weights = not dimensions.isdisjoint(_IMAGE_DIMENSIONS)
    facts = TaskFacts(
        **known | {"exact": roles.is_exact and not inexact},
        inexact=inexact,
        fingerprint="",
        **_optimizer_facts(optimizer, model),
        images=has_image_weights or not input_dimensions.isdisjoint(_IMAGE_DIMENSIONS),
        convolutions=has_image_weights,
        has_convolution_layers=has_image_weights or any(isinstance(module, _ConvNd) for module in model.modules()),
        normed=has_batch_normalization(model),
        recurrent=any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()),
        drops=any(map(_has_dropout, model.modules())),
        data_bytes=roles.train.nbytes() if isinstance(roles.train, Table) else None,
        steps=None if roles.batches is None else roles.batches * parts.task.epochs,
    )
    fingerprints = (
        fingerprint(parts.task, model, optimizer, batch, known | counted, digest) for digest in source_digests
    )
    return [facts.model_copy(update={"fingerprint": value}) for value in fingerprints]


def has_batch_normalization(model: nn.Module) -> bool:
    """Whether the model has a batch normalization layer of torch's."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _has_dropout(module: nn.Module) -> bool:
    """Whether the module has dropout; attention and recurrent layers have the share as an attribute."""
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and 0.0 < share < 1.0


def _optimizer_facts(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    # A wrapper may ignore the settings of its groups.
    names = () if any(map(inner_optimizers, member_optimizers(optimizer))) else ("foreach", "fused")
    switches = [name for name in names if all(name in group for group in optimizer.param_groups)]
    unfit = _why_not_fused(model) if "fused" in switches else ""
    known = ["forloop", *switches] if switches else []
    return {
        "optimizer": describe_optimizer(optimizer),
        "optimizers": list(optimizer.members) if isinstance(optimizer, NamedOptimizers) else [],
        "implementations": [name for name in known if name != "fused" or not unfit],
        "one_operation": _is_plain(optimizer),
        "not_fused": unfit,
        "closure": any(map(needs_closure, member_optimizers(optimizer))),
    }


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.SGD and not any(
        group[name] for group in optimizer.param_groups for name in ("momentum", "weight_decay")
    )


def _why_not_fused(model: nn.Module) -> str:
    """Returns why torch's fused kernels can't update the model; empty if they can.

    The kernels need parameters without gaps in memory, and dense gradients of real numbers.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            return f"the gradient of {name or 'the model'!r} is sparse"
    for name, value in model.named_parameters():
        if not value.is_floating_point():
            return f"the parameter {name!r} is not of real numbers"
        if value.requires_grad and not is_gapless(value):
            return f"the parameter {name!r} is a view with gaps in memory, of strides {value.stride()}"
    return ""


def trial_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer over stand-ins for the parameters, since a factory may register hooks on its parameters."""
    try:
        return check_optimizer(call_user_code("the optimizer factory", task.optimizer, _stand_ins(model)))
    except TaskError:  # the factory compares the stand-ins with the model's parameters
        return task.build_optimizer(model)


def _stand_ins(model: nn.Module) -> Parameters:
    """Returns parameters of the trainable ones' shapes, each with the memory of a single number."""
    parameters = Parameters(model)
    parameters.named = {
        name: nn.Parameter(torch.zeros((), dtype=value.dtype).expand(value.shape))
        for name, value in parameters.named.items()
    }
    parameters[:] = parameters.named.values()
    return parameters


Detector = Callable[[Task, nn.Module, Optimizer], Iterator[str]]
"""Yields one line for each part of a Task whose state hotloop can neither save nor derive from the seed."""


def unseeded_generators(task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yields the random generators of the Task's parts that can't be seeded."""
    roles = task.roles
    sources = {"data": roles.train, "validation": roles.validation, "test": roles.raw_test}
    owners = {name: owner for role, source in sources.items() for name, owner in generator_owners(source, role).items()}
    functions = {"prepare": roles.prepare, "augment": task.augment, "optimizer": optimizer}
    yield from unset_generators(owners | functions | task.owners(model))


def optimizers_in_hooks(task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yields a line if a hook on a parameter's gradient calls an optimizer, as with one optimizer per layer."""
    updated = [value for group in optimizer.param_groups for value in group["params"]]
    for value in [*model.parameters(), *updated]:
        for hook in [*(value._backward_hooks or {}).values(), *(value._post_accumulate_grad_hooks or {}).values()]:
            if (other := next(_captured_optimizers(hook, {id(optimizer)}), None)) is not None:
                yield f"a hook on a parameter's gradient has an optimizer ({type(other).__name__}), whose state is not saved"
                return


def _captured_optimizers(value: Any, seen: set[int]) -> Iterator[Optimizer]:
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        inner = [vars(value.__self__) if hasattr(value.__self__, "__dict__") else None]
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        inner = [variables.nonlocals, value.__defaults__, value.__kwdefaults__]
        inner += [one for one in variables.globals.values() if isinstance(one, Optimizer | dict | list)]
    elif hasattr(value, "__call__") and not isinstance(value, type | nn.Module):  # noqa: B004
        inner = [getattr(value, "__dict__", None)]
    for one in inner:
        yield from _captured_optimizers(one, seen)


DETECTORS: tuple[Detector, ...] = (unseeded_generators, optimizers_in_hooks)


def inexact_reasons(task: Task, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Returns one line for each reason; empty if a resumed run equals an uninterrupted run bit by bit.

    Args:
        optimizer: an optimizer of the Task's class; its parameters may be placeholders.
    """
    return list(dict.fromkeys(reason for detect in DETECTORS for reason in detect(task, model, optimizer)))
