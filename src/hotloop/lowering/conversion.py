"""A model of torch's modules as layers of `hotloop.arrays`, on the same memory: so its weights come back by themselves.

`KNOWN` holds the modules that can be written out, `_losses` and `rule_of` the losses and optimizers. What isn't there, or
has a setting that the layer hasn't, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop import arrays
from hotloop.arrays.layer import Chain, Layer
from hotloop.arrays.namespaces import namespace
from hotloop.errors import PlanError, kind
from hotloop.objective import Objective

_FIX = "use engine=eager"


def _refused(what: str, expected: str = "") -> PlanError:
    return PlanError(f"engine=arrays can't write out {what}", expected=expected, fix=_FIX)


def namespace_of(device: torch.device) -> Any:
    """NumPy for the CPU, CuPy for NVIDIA's and AMD's GPUs.

    Raises:
        PlanError: CuPy isn't installed.
    """
    return namespace("numpy" if device.type == "cpu" else "cupy")


def shared(tensor: Tensor, xp: Any) -> Any:
    """The tensor as an array on the same memory."""
    return xp.from_dlpack(tensor.detach())


# --- layers


@dataclass(frozen=True)
class Converted:
    """A model as layers.

    Attributes:
        chain: the layers, whose weights and buffers are the model's own memory.
        owned: each trainable parameter, with the layer and the name that it has there.
    """

    chain: Chain
    owned: list[tuple[nn.Parameter, Layer, str]]


def converted(model: nn.Module, xp: Any) -> Converted:
    """The model as layers of `hotloop.arrays`.

    Raises:
        PlanError: a module isn't known, has a setting or a hook that its layer hasn't, or is used twice.
    """
    pairs = list(_pairs(model, ""))
    modules = [module for _, module, _ in pairs]
    for name, module, layer in pairs:
        if sum(other is module for other in modules) > 1:
            raise _refused(f"{_called(name, module)}, which stands twice in the model", "each module once")
        if isinstance(layer, arrays.Embedding) and module is not modules[0]:
            raise _refused(f"{_called(name, module)} behind another module", "whole numbers, as the data has")
        _check_hooks(name, module)
        layer.weights = {key: shared(value, xp) for key, value in module.named_parameters(recurse=False)}
        layer.buffers = {key: shared(value, xp) for key, value in module.named_buffers(recurse=False)}
    owned = [
        (value, layer, key)
        for _, module, layer in pairs
        for key, value in module.named_parameters(recurse=False)
        if value.requires_grad
    ]
    tied = [value for place, (value, *_) in enumerate(owned) if any(value is other for other, *_ in owned[:place])]
    if tied:
        raise _refused(f"a parameter of shape {tuple(tied[0].shape)} that two modules share")
    return Converted(Chain([layer for *_, layer in pairs]), owned)


def _pairs(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Layer]]:
    """Name, module and layer of all modules that do something, in the order in which they do it."""
    if type(module) is nn.Sequential:
        _check_hooks(name, module)
        for place, child in module._modules.items():  # `named_children` leaves out what it has named already
            assert child is not None
            yield from _pairs(child, f"{name}.{place}" if name else place)
        return
    make = KNOWN.get(type(module))
    if make is None:
        known = ", ".join(sorted(one.__name__ for one in KNOWN))
        raise _refused(_called(name, module), f"nn.Sequential of modules that are known: {known}")
    try:
        yield name, module, make(module)
    except _Unknown as setting:
        raise _refused(f"{_called(name, module)} with {setting}") from None


def _called(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model, {kind(module)}"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_hooks(name: str, module: nn.Module) -> None:
    hooked = any(getattr(module, kept) for kept in _HOOKS)
    values = module.parameters(recurse=False)
    if hooked or any(value._backward_hooks or value._post_accumulate_grad_hooks for value in values):
        raise _refused(f"the hooks of {_called(name, module)}")


class _Unknown(Exception):
    """A setting of a module that its layer hasn't."""


def _plainly(module: Any, **settings: Any) -> None:
    """Refuses a module whose settings aren't these."""
    for name, value in settings.items():
        if getattr(module, name) != value:
            raise _Unknown(f"{name}={getattr(module, name)!r}")


def _dense(module: nn.Linear) -> Layer:
    return arrays.Dense(module.out_features, bias=module.bias is not None, each=True)


def _conv(module: nn.Conv2d) -> Layer:
    _plainly(module, padding_mode="zeros")
    if isinstance(module.padding, str):
        raise _Unknown(f"padding={module.padding!r}")
    return arrays.Conv(
        module.out_channels,
        _pair(module.kernel_size),
        _pair(module.stride),
        _pair(module.padding),
        _pair(module.dilation),
        module.groups,
        bias=module.bias is not None,
    )


def _max_pool(module: nn.MaxPool2d) -> Layer:
    _plainly(module, ceil_mode=False, return_indices=False)
    settings = (module.kernel_size, module.stride, module.padding, module.dilation)
    return arrays.MaxPool(*map(_pair, settings))


def _average_pool(module: nn.AvgPool2d) -> Layer:
    _plainly(module, ceil_mode=False, divisor_override=None)
    if _pair(module.padding) != (0, 0):
        _plainly(module, count_include_pad=True)
    return arrays.AveragePool(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))


def _global_pool(module: nn.AdaptiveAvgPool2d) -> Layer:
    if _pair(module.output_size) != (1, 1):
        raise _Unknown(f"output_size={module.output_size!r}")
    return arrays.AveragePool()


def _flatten(module: nn.Flatten) -> Layer:
    _plainly(module, start_dim=1, end_dim=-1)
    return arrays.Flatten()


def _embedding(module: nn.Embedding) -> Layer:
    _plainly(module, padding_idx=None, max_norm=None, scale_grad_by_freq=False, sparse=False)
    return arrays.Embedding(module.num_embeddings, module.embedding_dim)


def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d) -> Layer:
    _plainly(module, track_running_stats=True)
    if module.momentum is None:
        raise _Unknown("momentum=None")
    return arrays.BatchNorm(module.momentum, module.eps, module.affine)


def _layer_norm(module: nn.LayerNorm) -> Layer:
    affine = module.elementwise_affine
    layer = arrays.LayerNorm(len(module.normalized_shape), module.eps, affine, module.bias is not None)
    layer.last = tuple(module.normalized_shape)
    return layer


def _gelu(module: nn.GELU) -> Layer:
    _plainly(module, approximate="none")
    return arrays.GELU()


def _softplus(module: nn.Softplus) -> Layer:
    _plainly(module, beta=1.0, threshold=20.0)
    return arrays.Softplus()


def _softmax(module: nn.Softmax) -> Layer:
    if module.dim is None or module.dim == 0:
        raise _Unknown(f"dim={module.dim}")
    return arrays.Softmax(module.dim)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


KNOWN: dict[type[nn.Module], Callable[[Any], Layer]] = {
    nn.AdaptiveAvgPool2d: _global_pool,
    nn.AvgPool2d: _average_pool,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.Conv2d: _conv,
    nn.Dropout: lambda module: arrays.Dropout(module.p),
    nn.ELU: lambda module: arrays.ELU(module.alpha),
    nn.Embedding: _embedding,
    nn.Flatten: _flatten,
    nn.GELU: _gelu,
    nn.Identity: lambda module: arrays.Identity(),
    nn.LayerNorm: _layer_norm,
    nn.LeakyReLU: lambda module: arrays.LeakyReLU(module.negative_slope),
    nn.Linear: _dense,
    nn.MaxPool2d: _max_pool,
    nn.ReLU: lambda module: arrays.ReLU(),
    nn.Sigmoid: lambda module: arrays.Sigmoid(),
    nn.SiLU: lambda module: arrays.SiLU(),
    nn.Softmax: _softmax,
    nn.Softplus: _softplus,
    nn.Tanh: lambda module: arrays.Tanh(),
}
"""By exact type: a subclass may do anything."""


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
_PLAIN = {"reduction": "mean", "weight": None, "pos_weight": None, "label_smoothing": 0.0}


def loss_of(loss: Any) -> arrays.Loss:
    """A Task's loss as one of `hotloop.arrays`.

    Raises:
        PlanError: it isn't known, or has a setting that isn't.
    """
    function: Any = loss.func if isinstance(loss, partial) else loss
    given = loss.keywords if isinstance(loss, partial) else {}
    make = _MODULES.get(type(function)) or (_FUNCTIONS.get(function) if callable(function) else None)
    if make is None or (isinstance(loss, partial) and loss.args):
        names = ", ".join(f"nn.{one.__name__}" for one in _MODULES)
        name = getattr(function, "__name__", None)
        raise _refused(f"the loss {name or type(loss).__name__}", f"{names}, or their functions")
    for name, plain in _PLAIN.items():
        value = given.get(name, getattr(loss, name, plain) if not given else plain)
        if value is not plain and value != plain:
            raise _refused(f"{name}={value!r} of the loss")
    return make(Objective.of(loss).ignore_index) if make is arrays.CrossEntropy else make()


# --- optimizers


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> arrays.Optimizer:
    """How the weights of one of the optimizer's groups are updated, with the numbers that it has now.

    Raises:
        PlanError: the optimizer isn't known, or has a setting that isn't.
    """
    make = _RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(one.__name__ for one in _RULES)
        raise _refused(f"the optimizer {type(optimizer).__name__}", f"one of torch.optim: {names}")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise _refused(f"the hooks of {type(optimizer).__name__}")
    for name, plain in _PLAIN_GROUP.items():
        if name in group and group[name] != plain and not (name == "momentum" and type(optimizer) is torch.optim.SGD):
            raise _refused(f"{name}={group[name]!r} of {type(optimizer).__name__}")
    return make(group, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]))


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it remembers, for each weight, how many steps were taken."""
    return type(optimizer) is not torch.optim.SGD


_PLAIN_GROUP = {
    "amsgrad": False,
    "centered": False,
    "dampening": 0,
    "differentiable": False,
    "lr_decay": 0,
    "maximize": False,
    "momentum": 0,
}


def _sgd(group: dict[str, Any], **common: float) -> arrays.Optimizer:
    if not group["momentum"]:
        return arrays.SGD(**common)
    make = arrays.Nesterov if group["nesterov"] else arrays.Momentum
    return make(momentum=group["momentum"], **common)


def _adam(group: dict[str, Any], **common: float) -> arrays.Optimizer:
    make = arrays.AdamW if group.get("decoupled_weight_decay") else arrays.Adam
    beta1, beta2 = map(float, group["betas"])
    return make(beta1=beta1, beta2=beta2, eps=group["eps"], **common)


_RULES: dict[type[torch.optim.Optimizer], Callable[..., arrays.Optimizer]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: lambda group, **common: arrays.AdaGrad(eps=group["eps"], **common),
    torch.optim.RMSprop: lambda group, **common: arrays.RMSProp(alpha=group["alpha"], eps=group["eps"], **common),
    torch.optim.Adadelta: lambda group, **common: arrays.AdaDelta(rho=group["rho"], eps=group["eps"], **common),
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
