"""Checks of the torch losses that the first step calls: wrong shapes are rejected, and doubtful values are reported."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop.data.batch_tree import tree_tensors
from hotloop.errors import TaskError

_DIFFERENCE_LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_WITH_LOGITS = (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss, F.soft_margin_loss)
_PAIRED_LOSSES = (
    *_DIFFERENCE_LOSSES,
    *_WITH_LOGITS,
    *(F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss, F.kl_div, F.binary_cross_entropy),
)
"""Losses that compare each output with the target at the same index."""

_VIEW_NODES = (
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "Select",
    "Slice",
    "Reshape",
    "ToCopy",
    "Permute",
    "T",
    "Expand",
)
_ROUNDING = 1e-3
"""Tolerance of a sum of probabilities around 1, also in half precision."""


class LossCalls(TorchFunctionMode):
    """Checks each call of a torch loss.

    Args:
        batch: the batch of the loss.
        classes: whether the Task names the classes of its targets.

    Attributes:
        doubts: one line for each probable mistake.

    Raises:
        TaskError: torch would broadcast outputs and targets against each other.
    """

    def __init__(self, batch: Any, *, classes: bool) -> None:
        super().__init__()
        self.doubts: dict[str, None] = {}
        self._batch, self._classes = list(tree_tensors(batch)), classes

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _PAIRED_LOSSES or function in _CHECKS:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            output, target = given.get("input"), given.get("target")
            if isinstance(output, Tensor) and isinstance(target, Tensor):
                self._check(function, output.detach(), target.detach(), output)
        elif getattr(function, "__name__", "") in ("sub", "rsub", "__sub__", "__rsub__"):
            self._check_difference(args)
        return function(*args, **kwargs)

    def _check(self, function: Any, output: Tensor, target: Tensor, original: Tensor) -> None:
        if function in _PAIRED_LOSSES and self._is_broadcast(output, target):
            raise _shapes_differ(output, target)
        checks = _CHECKS.get(function, ())
        for doubt in (check(output, target, original) for check in checks):
            if doubt:
                self.doubts[doubt] = None
        whole = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
        if function in _DIFFERENCE_LOSSES and self._classes and whole:
            self.doubts[
                f"{function.__name__} compares the numbers of classes, as if class 2 were twice class 1: a classification "
                "needs one output for each class, and a cross entropy"
            ] = None

    def _is_broadcast(self, output: Tensor, target: Tensor) -> bool:
        """Checks whether the loss certainly compares outputs with targets of other samples."""
        if output.shape == target.shape or 1 in (output.numel(), target.numel()):
            return False
        if not _can_broadcast(output, target):
            return False  # torch raises its own error
        if _is_larger_broadcast(output, target) or any(_shares_memory(target, one) for one in self._batch):
            return True
        small, large = sorted((output, target), key=lambda value: value.ndim)
        return small.ndim < large.ndim and small.shape[:1] == large.shape[:1]

    def _check_difference(self, operands: Sequence[Any]) -> None:
        """Checks a subtraction whose left or right side is the batch's target."""
        if len(operands) < 2 or not all(isinstance(one, Tensor) for one in operands[:2]) or not self._batch:
            return
        one, other = operands[:2]
        target = self._batch[-1]
        if not (_shares_memory(one, target) or _shares_memory(other, target)) or not _can_broadcast(one, other):
            return
        if _is_larger_broadcast(one, other):
            self.doubts[
                f"the loss subtracts tensors of shapes {tuple(one.shape)} and {tuple(other.shape)}, which compares each output "
                "with the targets of all samples: reshape one of them, such as y[:, None] or model(x).flatten()"
            ] = None


def _shapes_differ(output: Tensor, target: Tensor) -> TaskError:
    def shown(value: Tensor) -> str:
        return f"({', '.join(map(str, value.shape))})"

    return TaskError(
        f"the loss got outputs of shape {shown(output)} and targets of shape {shown(target)}",
        expected="equal shapes: torch would compare each output with each target",
        fix="reshape one of them, such as y[:, None] or model(x).flatten()",
    )


def _can_broadcast(one: Tensor, other: Tensor) -> bool:
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _is_larger_broadcast(one: Tensor, other: Tensor) -> bool:
    return torch.broadcast_shapes(one.shape, other.shape).numel() > max(one.numel(), other.numel())


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    plain = one.layout == other.layout == torch.strided
    return plain and one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


# --- doubtful values: each check takes (output, target, output with its autograd graph), and returns a line or ""


def _not_logarithms(output: Tensor, target: Tensor, original: Tensor) -> str:
    largest = float(output.max()) if output.numel() else 0.0
    if not largest > _ROUNDING:
        return ""
    return (
        f"nll_loss got outputs up to {largest:.3g}, and the logarithm of a probability is at most 0: end the model with "
        "log_softmax, or use a cross entropy"
    )


def _softmax_twice(output: Tensor, target: Tensor, original: Tensor) -> str:
    dim = min(1, output.ndim - 1)
    if output.ndim == 0 or output.shape[dim] < 2 or not output.numel() or not _is_probability(output):
        return ""
    off = (output.float().sum(dim) - 1).abs().max()
    if not float(off) <= _ROUNDING:
        return ""
    return (
        "cross_entropy got probabilities, which sum to 1 for each sample, and takes their softmax once more: leave the "
        "softmax out of the model"
    )


def _sigmoid_twice(output: Tensor, target: Tensor, original: Tensor) -> str:
    name = _producing_operation(original)
    if not name.startswith(("Sigmoid", "Softmax")) or not _is_probability(output):
        return ""
    return (
        f"a loss of logits got probabilities, the result of a {name.lower()}: leave that out of the model, or use "
        "binary_cross_entropy (BCELoss)"
    )


def _refuse_logits(output: Tensor, target: Tensor, original: Tensor) -> str:
    low, high = (float(value) for value in output.aminmax()) if output.numel() else (0.0, 1.0)
    if low < 0 or high > 1:
        raise TaskError(
            f"binary_cross_entropy got outputs from {low:.3g} to {high:.3g}",
            expected="probabilities from 0 to 1",
            fix="use BCEWithLogitsLoss, or end the model with a sigmoid",
        )
    return ""


def _is_probability(output: Tensor) -> bool:
    low, high = output.aminmax()
    return float(low) >= 0 and float(high) <= 1


def _producing_operation(output: Tensor) -> str:
    """Returns the operation that computed a tensor, apart from views and casts; empty for a leaf."""
    node = output.grad_fn
    while node is not None and _operation_name(node) in _VIEW_NODES:
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return "" if node is None else _operation_name(node)


def _operation_name(node: Any) -> str:
    """Returns `Sigmoid` for a `SigmoidBackward0`."""
    return re.sub(r"Backward\d*$", "", node.name())


LossCheck = Callable[[Tensor, Tensor, Tensor], str]

_CHECKS: dict[Any, tuple[LossCheck, ...]] = {
    F.nll_loss: (_not_logarithms,),
    F.cross_entropy: (_softmax_twice,),
    F.binary_cross_entropy: (_refuse_logits,),
    **dict.fromkeys(_WITH_LOGITS, (_sigmoid_twice,)),
}


@contextmanager
def watch_losses(model: nn.Module, batch: Any, *, classes: bool) -> Iterator[LossCalls | None]:
    """Checks the losses called in the context; None if the user compiled the model, whose guards a mode would invalidate."""
    if any(map(_is_compiled, model.modules())):
        yield None
        return
    with LossCalls(batch, classes=classes) as calls:
        yield calls


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
