"""Computes in float64 with tensors that a model or a loss holds in float32, wherever it holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def widen_model(model: nn.Module) -> nn.Module:
    """The model in float64, in place; `module.double()` leaves complex numbers as they are."""
    return model.double()._apply(widened)


class Widening(TorchDispatchMode):
    """Widens the other operands of each operation that has a float64 operand.

    Class weights of a loss, for example, are attributes, variables of a closure, arguments of a `functools.partial` or
    globals: `module.double()` doesn't reach them.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not function._schema.is_mutable and tree_any(_is_wide, (args, kwargs)):
            args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
            if kwargs.get("dtype") in _WIDE:  # a cast to what the model computes in, which is float64 here
                kwargs = {**kwargs, "dtype": _WIDE[kwargs["dtype"]]}
        return function(*args, **kwargs)


def widened(value: Tensor) -> Tensor:
    """A tensor of single precision in double precision; any other as it is."""
    return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _WIDE.values()
