"""Losses of a Task: their properties, those that a step yields, and whether outputs are class scores."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hotloop.errors import TaskError, type_name

_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_MEAN_LOSSES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
)
"""torch's losses that are means over all numbers of outputs with any batch size."""
_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_IGNORE_INDEX = -100
"""The default `ignore_index` of torch's cross entropies."""


@dataclass(frozen=True, eq=False)
class LossInfo:
    """Properties of a torch loss, or of a loss with the same attributes.

    Attributes:
        cross_entropy: whether the loss compares class scores (batch, classes, ...) with labels (batch, ...).
        ignore_index: the ignored target; None without one.
        class_weights: weight of each class, (classes,); None for equal weights.
        reduction: `mean`, `sum`, `none` or another loss's own word.
        sums_samples: whether the mean over a batch is the mean of its samples' losses.
    """

    cross_entropy: bool
    ignore_index: int | None
    class_weights: Tensor | None
    reduction: str
    sums_samples: bool = False

    @classmethod
    def from_loss(cls, loss: Any) -> LossInfo:
        """Returns the properties of a module, a function, or a `functools.partial` of a function."""
        function = loss.func if isinstance(loss, partial) else loss
        is_function = any(function is known for known in _FUNCTIONS)

        def option(name: str, default: Any) -> Any:
            return loss.keywords.get(name, default) if function is not loss else getattr(loss, name, default)

        ignore_index = option("ignore_index", _IGNORE_INDEX if is_function else None)
        weights = option("weight", None) if ignore_index is not None else None
        return cls(
            cross_entropy=is_function or isinstance(loss, _MODULES),
            ignore_index=ignore_index,
            class_weights=weights if isinstance(weights, Tensor) else None,
            reduction=str(option("reduction", "mean")),
            sums_samples=is_function
            or type(loss) in _MODULES + _MEAN_LOSSES
            or any(function is known for known in _MEAN_LOSSES),
        )

    def weight_of(self, target: Any, samples: int) -> Any:
        """Returns the divisor of the mean over `target`, up to a constant: a number or a 0-dim tensor."""
        if self.ignore_index is None or not isinstance(target, Tensor) or target.is_floating_point():
            return samples  # class probabilities are also averaged over the samples
        counted = target != self.ignore_index
        if self.class_weights is None:
            return counted.sum()
        return torch.where(counted, self.class_weights[torch.where(counted, target, 0)], 0.0).sum()


def weight_mean(mean: Tensor, weight: Any) -> Tensor:
    """Returns `mean * weight`; 0 for weight 0, because a mean over no target is NaN."""
    total = mean * weight
    return torch.where(weight == 0, 0.0, total) if isinstance(weight, Tensor) else total


_FORM = "(name, loss) or (name, loss, {'figure': value}), with the name of an optimizer"


class YieldedLoss(NamedTuple):
    """One yielded update: the optimizer's name, the loss (0-dim) and further scalars."""

    name: str
    loss: Tensor
    scalars: dict[str, Tensor]


class YieldedLosses:
    """Runs a step's generator from loss to loss, and collects the yielded and returned scalars."""

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self._generator = generator
        self._losses: dict[str, list[Tensor]] = {}
        self._scalars: dict[str, list[Tensor]] = {}

    def __iter__(self) -> Iterator[YieldedLoss]:
        while True:
            try:
                yielded = next(self._generator)
            except StopIteration as end:
                self._note(named_scalars({} if end.value is None else end.value))
                return
            turn = _parse_yield(yielded)
            yield turn
            self._losses.setdefault(turn.name, []).append(turn.loss.detach())
            self._note(turn.scalars)

    def _note(self, scalars: Mapping[str, Tensor]) -> None:
        for name, value in scalars.items():
            self._scalars.setdefault(name, []).append(value.detach())

    def figures(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the batch's loss and its scalars.

        The scalars are `<name>_loss`, the mean of the losses of each optimizer, and the step's own scalars. The batch's
        loss is the sum of the means.

        Raises:
            TaskError: the step yielded no loss, or gave a scalar the name of an optimizer's loss.
        """
        if not self._losses:
            raise TaskError("step yielded no loss", expected=_FORM, fix="yield one for each update")
        losses = {f"{name}_loss": _mean_scalars(values) for name, values in self._losses.items()}
        for name in losses.keys() & self._scalars.keys():
            raise TaskError(f"step gave {name!r}, which hotloop reports itself", expected="another name")
        others = {name: _mean_scalars(values) for name, values in self._scalars.items()}
        return sum(losses.values(), start=torch.zeros_like(next(iter(losses.values())))), losses | others


def sum_for_evaluation(generator: Generator[Any, Any, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs a step's generator without updates; returns the loss and the scalars.

    Gradients are enabled, because a loss may contain the gradient of another loss.
    """
    turns = YieldedLosses(generator)
    with torch.enable_grad(), closing(generator):
        for _ in turns:
            pass
    return turns.figures()


def named_scalars(figures: Any) -> dict[str, Tensor]:
    """Returns a step's own scalars as 0-dim tensors.

    Raises:
        TaskError: `figures` is no mapping of single numbers, or a name is reserved for hotloop.
    """
    if not isinstance(figures, Mapping):
        raise TaskError(f"step gave {type_name(figures)} beside the losses", expected="a dict of name -> number")
    scalars = {name: torch.as_tensor(value) for name, value in figures.items()}
    for name, value in scalars.items():
        if value.ndim:
            raise TaskError(
                f"step returned {name!r} of shape {tuple(value.shape)}", expected="single numbers beside the loss"
            )
        if name in ("loss", "weight", "samples"):
            fix = f"give it another name, such as 'mean_{name}'"
            raise TaskError(f"step returned {name!r}, which hotloop counts itself", expected="another name", fix=fix)
    return scalars


def _parse_yield(yielded: Any) -> YieldedLoss:
    if not isinstance(yielded, tuple) or len(yielded) not in (2, 3) or not isinstance(yielded[0], str):
        what = f"({', '.join(map(type_name, yielded))})" if isinstance(yielded, tuple) else type_name(yielded)
        raise TaskError(f"step yielded {what}", expected=_FORM)
    name, loss, *more = yielded
    if not isinstance(loss, Tensor) or loss.ndim:
        raise TaskError(
            f"the loss yielded for {name!r} is "
            + (f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type_name(loss)),
            expected="a 0-dim tensor to differentiate",
            fix="yield the mean over the batch",
        )
    return YieldedLoss(name, loss, named_scalars(more[0]) if more else {})


def _mean_scalars(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    whole = torch.stack(values)
    return whole.mean(dtype=None if whole.is_floating_point() else torch.get_default_dtype())


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
