"""torch's modules and functions with the layers of `hotloop.arrays` that compute the same.

Other modules, functions and settings can't be converted.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop import arrays
from hotloop.arrays.layer import Layer


class UnsupportedSetting(Exception):
    """A setting of a module or function that its layer lacks."""


def layer_of_module(module: nn.Module) -> Layer:
    """Returns the layer of a module in `MODULES`.

    Raises:
        UnsupportedSetting: the layer lacks one of its settings.
    """
    return MODULES[type(module)](module)


def layer_of_function(function: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Layer:
    """Returns the layer of a function in `FUNCTIONS`, or of a tensor method of that name.

    Args:
        arguments, named: the call's arguments without the tensor.

    Raises:
        UnsupportedSetting: the layer lacks one of the arguments.
    """
    make = FUNCTIONS[function]
    try:
        bound = inspect.signature(make).bind(
            *arguments, **{key: named[key] for key in named if key not in _IGNORED_OPTIONS}
        )
    except TypeError:
        raise UnsupportedSetting(f"the arguments {tuple(arguments)} {named or ''}".rstrip()) from None
    if named.get("dtype") is not None:
        raise UnsupportedSetting(f"dtype={named['dtype']}")
    made = make(*bound.args, **bound.kwargs)
    return made if isinstance(made, Layer) else layer_of_module(made)


_IGNORED_OPTIONS = ("inplace", "_stacklevel", "dtype")


def _require_settings(module: Any, **settings: Any) -> None:
    for name, value in settings.items():
        if getattr(module, name) != value:
            raise UnsupportedSetting(f"{name}={getattr(module, name)!r}")


# --- modules


def _dense(module: nn.Linear) -> Layer:
    return arrays.Dense(module.out_features, bias=module.bias is not None, each=True)


def _conv(module: nn.Conv2d) -> Layer:
    _require_settings(module, padding_mode="zeros")
    if isinstance(module.padding, str):
        raise UnsupportedSetting(f"padding={module.padding!r}")
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
    _require_settings(module, ceil_mode=False, return_indices=False)
    settings = (module.kernel_size, module.stride, module.padding, module.dilation)
    return arrays.MaxPool(*map(_pair, settings))


def _average_pool(module: nn.AvgPool2d) -> Layer:
    _require_settings(module, ceil_mode=False, divisor_override=None)
    if _pair(module.padding) != (0, 0):
        _require_settings(module, count_include_pad=True)
    return arrays.AveragePool(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))


def _global_pool(module: nn.AdaptiveAvgPool2d) -> Layer:
    if _pair(module.output_size) != (1, 1):
        raise UnsupportedSetting(f"output_size={module.output_size!r}")
    return arrays.AveragePool()


def _flatten(module: nn.Flatten) -> Layer:
    _require_settings(module, start_dim=1, end_dim=-1)
    return arrays.Flatten()


def _embedding(module: nn.Embedding) -> Layer:
    _require_settings(module, padding_idx=None, max_norm=None, scale_grad_by_freq=False, sparse=False)
    return arrays.Embedding(module.num_embeddings, module.embedding_dim)


def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d) -> Layer:
    _require_settings(module, track_running_stats=True, training=True)
    if module.momentum is None:
        raise UnsupportedSetting("momentum=None")
    return arrays.BatchNorm(module.momentum, module.eps, module.affine)


def _layer_norm(module: nn.LayerNorm) -> Layer:
    affine = module.elementwise_affine
    layer = arrays.LayerNorm(len(module.normalized_shape), module.eps, affine, module.bias is not None)
    layer.last = tuple(module.normalized_shape)
    return layer


def _dropout(module: nn.Dropout) -> Layer:
    _require_settings(module, training=True)
    return arrays.Dropout(module.p)


def _recurrent(make: Callable[[int], Layer], **settings: Any) -> Callable[[Any], Layer]:
    def layer(module: nn.RNNBase) -> Layer:
        plain = dict(num_layers=1, bidirectional=False, batch_first=True, bias=True, proj_size=0)
        _require_settings(module, **plain, **settings)
        return make(module.hidden_size)

    return layer


def _gelu(module: nn.GELU) -> Layer:
    _require_settings(module, approximate="none")
    return arrays.GELU()


def _softplus(module: nn.Softplus) -> Layer:
    _require_settings(module, beta=1.0, threshold=20.0)
    return arrays.Softplus()


def _softmax(module: nn.Softmax) -> Layer:
    if module.dim is None or module.dim == 0:
        raise UnsupportedSetting(f"dim={module.dim}")
    return arrays.Softmax(module.dim)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


MODULES: dict[type[nn.Module], Callable[[Any], Layer]] = {
    nn.AdaptiveAvgPool2d: _global_pool,
    nn.AvgPool2d: _average_pool,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.Conv2d: _conv,
    nn.Dropout: _dropout,
    nn.ELU: lambda module: arrays.ELU(module.alpha),
    nn.Embedding: _embedding,
    nn.Flatten: _flatten,
    nn.GELU: _gelu,
    nn.Identity: lambda module: arrays.Identity(),
    nn.LayerNorm: _layer_norm,
    nn.LeakyReLU: lambda module: arrays.LeakyReLU(module.negative_slope),
    nn.Linear: _dense,
    nn.LSTM: _recurrent(arrays.LSTM),
    nn.MaxPool2d: _max_pool,
    nn.ReLU: lambda module: arrays.ReLU(),
    nn.RNN: _recurrent(arrays.RNN, nonlinearity="tanh"),
    nn.Sigmoid: lambda module: arrays.Sigmoid(),
    nn.SiLU: lambda module: arrays.SiLU(),
    nn.Softmax: _softmax,
    nn.Softplus: _softplus,
    nn.Tanh: lambda module: arrays.Tanh(),
}
"""By exact type: a subclass may have another forward."""


# --- functions, as the modules that do the same


def _mean(dim: Any = None, keepdim: bool = False) -> Layer:
    axes = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if keepdim or not axes or not all(isinstance(axis, int) and axis for axis in axes):
        raise UnsupportedSetting(f"dim={dim!r}" if not keepdim else "keepdim=True")
    return arrays.Mean(axes)


def _pool_module(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> nn.Module:
    return nn.MaxPool2d(kernel_size, stride or None, padding, dilation, return_indices, ceil_mode)


def _average_module(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> nn.Module:
    return nn.AvgPool2d(kernel_size, stride or None, padding, ceil_mode, count_include_pad, divisor_override)


_BY_NAME: dict[str, Callable[..., nn.Module | Layer]] = {
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
    "avg_pool2d": _average_module,
    "contiguous": lambda: nn.Identity(),
    "dropout": lambda p=0.5, training=True: nn.Dropout(p) if training else nn.Identity(),
    "elu": lambda alpha=1.0: nn.ELU(alpha),
    "flatten": lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim),
    "gelu": lambda approximate="none": nn.GELU(approximate),
    "leaky_relu": lambda negative_slope=0.01: nn.LeakyReLU(negative_slope),
    "max_pool2d": _pool_module,
    "mean": _mean,
    "relu": lambda: nn.ReLU(),
    "relu_": lambda: nn.ReLU(),
    "sigmoid": lambda: nn.Sigmoid(),
    "silu": lambda: nn.SiLU(),
    "softmax": lambda dim=None: nn.Softmax(dim),
    "softplus": lambda beta=1.0, threshold=20.0: nn.Softplus(beta, threshold),
    "tanh": lambda: nn.Tanh(),
}
FUNCTIONS: dict[Any, Callable[..., nn.Module | Layer]] = {
    key: make
    for name, make in _BY_NAME.items()
    for key in [
        *(getattr(home, name) for home in (torch, functional) if hasattr(home, name)),
        *([name] if hasattr(Tensor, name) else []),
    ]
}
"""Functions, and names of tensor methods, with their arguments besides the tensor."""

SUM_FUNCTIONS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
"""Functions that add two tensors."""

IN_PLACE_FUNCTIONS: tuple[Any, ...] = (operator.iadd, torch.relu_, "add_", "relu_")
"""Functions that change their input; others do with `inplace=True`."""

VIEW_FUNCTIONS: tuple[Any, ...] = (
    torch.flatten,
    "flatten",
    "view",
    "reshape",
    torch.reshape,
    "contiguous",
    operator.getitem,
)
"""Functions that may return a view of the same memory, as `nn.Flatten` and `nn.Identity`."""
