"""Conversion of a Task's model, loss and optimizer to `hotloop.arrays` on the same memory.

A part or a setting without counterpart there is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop import arrays
from hotloop.arrays.backend import namespace
from hotloop.arrays.graph import Graph
from hotloop.arrays.layer import Layer
from hotloop.core.task_parts.losses import LossInfo
from hotloop.lowering.arrays_engine.graph_trace import LayerCall, module_label, trace_layers, unsupported_error


def namespace_of(device: torch.device) -> Any:
    """Returns NumPy for the CPU, CuPy for NVIDIA's and AMD's GPUs.

    Raises:
        PlanError: CuPy isn't installed.
    """
    return namespace("numpy" if device.type == "cpu" else "cupy")


def as_array(tensor: Tensor, xp: Any) -> Any:
    """Returns the tensor as an array on the same memory."""
    return xp.from_dlpack(tensor.detach())


# --- layers


@dataclass(frozen=True)
class ConvertedModel:
    """A model as layers.

    Attributes:
        graph: the layers, on the memory of the model's weights and buffers.
        calls: each layer with its module.
        owned_modules: each trainable parameter with the layers that use it and its name there.
    """

    graph: Graph
    calls: list[LayerCall]
    owned_modules: list[tuple[nn.Parameter, list[tuple[Layer, str]]]]


def convert_model(model: nn.Module, xp: Any) -> ConvertedModel:
    """Converts the model to layers of `hotloop.arrays`.

    A module that is called several times, and modules that share a parameter, become several layers on one memory.

    Raises:
        PlanError: a module or function of the forward pass is unknown, or has a setting or a hook that its layer lacks.
    """
    for name, module in model.named_modules():
        _check_hooks(name, module)
    graph, calls = trace_layers(model)
    users: dict[nn.Parameter, list[tuple[Layer, str]]] = {}
    for call in calls:
        if call.module is None:
            continue
        for name, value in call.module.named_parameters(recurse=False):
            key = name.removesuffix("_l0")  # suffix in recurrent modules
            call.layer.weights[key] = as_array(value, xp)
            if value.requires_grad:
                users.setdefault(value, []).append((call.layer, key))
        call.layer.buffers = {key: as_array(value, xp) for key, value in call.module.named_buffers(recurse=False)}
    return ConvertedModel(graph, calls, list(users.items()))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_hooks(name: str, module: nn.Module) -> None:
    hooked = any(getattr(module, hooks) for hooks in _HOOKS)
    values = module.parameters(recurse=False)
    if hooked or any(value._backward_hooks or value._post_accumulate_grad_hooks for value in values):
        raise unsupported_error(f"the hooks of {module_label(name, module)}")


# --- losses


_MODULES: dict[type[nn.Module], Callable[..., arrays.Loss]] = {
    nn.CrossEntropyLoss: arrays.CrossEntropy,
    nn.BCEWithLogitsLoss: arrays.BinaryCrossEntropy,
    nn.MSELoss: arrays.SquaredError,
}
_FUNCTIONS: dict[Any, Callable[..., arrays.Loss]] = {
    functional.cross_entropy: arrays.CrossEntropy,
    functional.binary_cross_entropy_with_logits: arrays.BinaryCrossEntropy,
    functional.mse_loss: arrays.SquaredError,
}
_DEFAULT_OPTIONS = {"reduction": "mean", "weight": None, "pos_weight": None, "label_smoothing": 0.0}


def convert_loss(loss: Any) -> arrays.Loss:
    """Converts a Task's loss to one of `hotloop.arrays`.

    Raises:
        PlanError: the loss or one of its settings is unknown.
    """
    function: Any = loss.func if isinstance(loss, partial) else loss
    keywords = loss.keywords if isinstance(loss, partial) else {}
    make = _MODULES.get(type(function)) or (_FUNCTIONS.get(function) if callable(function) else None)
    if make is None or (isinstance(loss, partial) and loss.args):
        names = ", ".join(f"nn.{known.__name__}" for known in _MODULES)
        name = getattr(function, "__name__", None)
        raise unsupported_error(f"the loss {name or type(loss).__name__}", f"{names}, or their functions")
    for name, plain in _DEFAULT_OPTIONS.items():
        value = keywords.get(name, getattr(loss, name, plain) if not keywords else plain)

        if value is not plain and value != plain:
            raise unsupported_error(f"{name}={value!r} of the loss")
    return make(LossInfo.from_loss(loss).ignore_index) if make is arrays.CrossEntropy else make()


# --- optimizers


def convert_optimizer(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> arrays.Optimizer:
    """Returns the update rule of a parameter group with its present numbers.

    Raises:
        PlanError: the optimizer or one of its settings is unknown.
    """
    make = _CONVERTERS.get(type(optimizer))
    if make is None:
        names = ", ".join(known.__name__ for known in _CONVERTERS)
        raise unsupported_error(f"the optimizer {type(optimizer).__name__}", f"one of torch.optim: {names}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise unsupported_error(f"the hooks of {type(optimizer).__name__}")
    for name, plain in _DEFAULT_GROUP.items():
        if name in group and group[name] != plain and not (name == "momentum" and type(optimizer) is torch.optim.SGD):
            raise unsupported_error(f"{name}={group[name]!r} of {type(optimizer).__name__}")
    return make(group, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))


def has_step_count(optimizer: torch.optim.Optimizer) -> bool:
    """Checks whether the optimizer counts the steps of each weight."""
    return type(optimizer) is not torch.optim.SGD


_DEFAULT_GROUP = {
    "amsgrad": False,
    "centered": False,
    "dampening": 0,
    "differentiable": False,
    "lr_decay": 0,
    "maximize": False,
    "momentum": 0,
}


def _convert_sgd(group: dict[str, Any], **common: float) -> arrays.Optimizer:
    if not group["momentum"]:
        return arrays.SGD(**common)
    make = arrays.Nesterov if group["nesterov"] else arrays.Momentum
    return make(momentum=group["momentum"], **common)


def _convert_adam(group: dict[str, Any], **common: float) -> arrays.Optimizer:
    make = arrays.AdamW if group.get("decoupled_weight_decay") else arrays.Adam
    beta1, beta2 = map(float, group["betas"])
    return make(beta1=beta1, beta2=beta2, eps=group["eps"], **common)


_CONVERTERS: dict[type[torch.optim.Optimizer], Callable[..., arrays.Optimizer]] = {
    torch.optim.SGD: _convert_sgd,
    torch.optim.Adagrad: lambda group, **common: arrays.AdaGrad(eps=group["eps"], **common),
    torch.optim.RMSprop: lambda group, **common: arrays.RMSProp(alpha=group["alpha"], eps=group["eps"], **common),
    torch.optim.Adadelta: lambda group, **common: arrays.AdaDelta(rho=group["rho"], eps=group["eps"], **common),
    torch.optim.Adam: _convert_adam,
    torch.optim.AdamW: _convert_adam,
}
