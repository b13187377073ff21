"""TaskFacts: what is known of a Task without running it for long."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from hotloop.data.feed import peek
from hotloop.data.roles import Roles
from hotloop.data.source import Stream, Table
from hotloop.data.tree import inputs_of, tensors
from hotloop.errors import TaskError, calling
from hotloop.exactness import inexact_reasons
from hotloop.lowering.attributes import unchanged
from hotloop.lowering.fingerprint import fingerprint
from hotloop.lowering.ingredients import Ingredients, count_parameters, counts_samples, input_shapes
from hotloop.lowering.step import needs_closure
from hotloop.lowering.update import gapless
from hotloop.named_optimizers import NamedOptimizers, checked_optimizer, described, members_of
from hotloop.optimizer_state import inner_optimizers
from hotloop.records import TaskFacts
from hotloop.task import Parameters, Task

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
