"""Detects classification: outputs are class scores and targets are labels with certainty."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COMPARISONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)
"""Losses of scores (batch, classes, ...) and labels (batch, ...)."""

_SOFTMAX_FUNCTIONS = (
    *(F.softmax, torch.softmax, Tensor.softmax),
    *(F.log_softmax, torch.log_softmax, Tensor.log_softmax),
)


class LossReads(TorchFunctionMode):
    """Records the tensors that torch's classification losses and softmax functions read in a loss."""

    def __init__(self) -> None:
        super().__init__()
        self._compared: list[tuple[Tensor, Tensor]] = []
        self._normalised: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _COMPARISONS:
            scores = args[0] if args else kwargs.get("input")
            labels = args[1] if len(args) > 1 else kwargs.get("target")
            if isinstance(scores, Tensor) and isinstance(labels, Tensor):
                self._compared.append((scores, labels))
        elif function in _SOFTMAX_FUNCTIONS and args and isinstance(args[0], Tensor):
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if dim in (1, 1 - args[0].ndim):
                self._normalised.append(args[0])
        return function(*args, **kwargs)

    def as_classes(self, output: Any, target: Any) -> bool:
        """Returns whether the loss read the output as class scores of the target, along dimension 1."""
        if not has_class_shapes(output, target) or output.shape[1] < 2:
            return False
        compared = any(
            _is_same_tensor(scores, output) and _is_same_tensor(labels, target) for scores, labels in self._compared
        )
        return compared or any(_is_same_tensor(scores, output) for scores in self._normalised)


def _is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors share their memory, or one may be a cast of the other."""
    if one.dtype != other.dtype:
        return one.shape == other.shape and one.ndim <= 2
    return one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


def has_class_shapes(output: Any, target: Any) -> bool:
    """Returns whether shapes and dtypes fit class scores (batch, classes, ...) and int64 labels (batch, ...)."""
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and output.is_floating_point()
        and output.ndim == target.ndim + 1
        and output.shape[:1] + output.shape[2:] == target.shape
    )


def count_correct(output: Tensor, target: Tensor, ignored: int | None = None) -> tuple[Tensor, Tensor | int]:
    """Returns the number of correct predictions and the number of counted targets.

    Args:
        output: class scores (batch, classes, ...).
        target: int64 labels (batch, ...).
        ignored: a label that doesn't count, such as the loss's `ignore_index`.
    """
    hits = output.argmax(dim=1) == target
    if ignored is None:
        return hits.sum(), target.numel()
    counted = target != ignored
    return (hits & counted).sum(), counted.sum()
