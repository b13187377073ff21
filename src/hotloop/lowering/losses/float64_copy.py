"""Computing in float64 with a model or a loss that has float32 tensors in any of its objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.torch_private import TorchDispatchMode, tree_any, tree_map_only

_WIDE_DTYPES = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def widen_model(model: nn.Module) -> nn.Module:
    """Converts the model to float64 in place, including complex tensors, which `module.double()` skips; returns the model."""
    return model.double()._apply(to_float64)


class Float64Mode(TorchDispatchMode):
    """Converts the other operands of each operation with a float64 operand to float64.

    Class weights of a loss, for example, may be in a closure, in arguments of a `functools.partial` or in globals, which
    `module.double()` doesn't convert.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not function._schema.is_mutable and tree_any(_is_float64, (args, kwargs)):
            args, kwargs = tree_map_only(Tensor, to_float64, (args, kwargs))
            if kwargs.get("dtype") in _WIDE_DTYPES:  # a cast to the model's dtype, which is float64 here
                kwargs = {**kwargs, "dtype": _WIDE_DTYPES[kwargs["dtype"]]}
        return function(*args, **kwargs)


def to_float64(value: Tensor) -> Tensor:
    """Returns a float32 or complex64 tensor in double precision; other tensors unchanged."""
    return value.to(_WIDE_DTYPES[value.dtype]) if value.dtype in _WIDE_DTYPES else value


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _WIDE_DTYPES.values()
