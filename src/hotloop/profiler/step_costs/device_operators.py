"""Operators that differ between devices, traced on the CPU: updates over lists, and dropout as one kernel on GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class _GpuOperators(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0:
            return input
        return torch.native_dropout(input, p, True)[0]


def operators_of(device: str) -> AbstractContextManager[Any]:
    """Returns a context in which a trace on the CPU takes the operators of a kind of device."""
    return nullcontext() if device == "cpu" else _GpuOperators()


def choose_implementation(group: dict[str, Any], asked: str, device: str) -> None:
    """Sets how an optimizer's parameter group is updated, by the plan's axis `optimizer` and the device's default."""
    if asked != "default":
        for name, key in (("foreach", "foreach"), ("fused", "fused")):
            if key in group:
                group[key] = asked == name
    elif device != "cpu" and group.get("foreach", True) is None and not group.get("fused"):
        group["foreach"] = True
