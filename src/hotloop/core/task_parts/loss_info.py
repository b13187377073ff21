"""What a loss says of itself: whether it is a cross entropy, which targets it leaves out, and how it weighs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_MEAN_LOSSES = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
)
"""Losses of torch that are means over all numbers of the outputs, which may be of any batch."""
_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_IGNORE_INDEX = -100
"""What torch's cross entropies leave out unless told otherwise."""


@dataclass(frozen=True, eq=False)
class LossInfo:
    """A loss of torch's own, or of the same attributes; of any other, nothing is known.

    Attributes:
        cross_entropy: whether it compares class scores (batch, classes, ...) with class numbers (batch, ...).
        ignore_index: the target that it leaves out; None if there is no such thing.
        class_weights: what each class counts, (classes,); None if all count the same.
        reduction: `mean`, `sum`, `none` or another's word.
        sums_samples: whether a mean over more samples is the mean of their losses, whatever else is in the batch.
    """

    cross_entropy: bool
    ignore_index: int | None
    class_weights: Tensor | None
    reduction: str
    sums_samples: bool = False

    @classmethod
    def from_loss(cls, loss: Any) -> LossInfo:
        """What is known of `loss`: a module, a function, or a `functools.partial` of a function."""
        function = loss.func if isinstance(loss, partial) else loss
        is_function = any(function is known for known in _FUNCTIONS)

        def said(name: str, otherwise: Any) -> Any:
            return loss.keywords.get(name, otherwise) if function is not loss else getattr(loss, name, otherwise)

        ignore_index = said("ignore_index", _IGNORE_INDEX if is_function else None)
        weights = said("weight", None) if ignore_index is not None else None
        return cls(
            cross_entropy=is_function or isinstance(loss, _MODULES),
            ignore_index=ignore_index,
            class_weights=weights if isinstance(weights, Tensor) else None,
            reduction=str(said("reduction", "mean")),
            sums_samples=is_function
            or type(loss) in _MODULES + _MEAN_LOSSES
            or any(function is known for known in _MEAN_LOSSES),
        )

    def weight_of(self, target: Any, samples: int) -> Any:
        """By what a mean over `target` was divided, up to a constant: a number, or a 0-dim tensor."""
        if self.ignore_index is None or not isinstance(target, Tensor) or target.is_floating_point():
            return samples  # probabilities of classes, too, are averaged over the samples
        counted = target != self.ignore_index
        if self.class_weights is None:
            return counted.sum()
        return torch.where(counted, self.class_weights[torch.where(counted, target, 0)], 0.0).sum()


def weight_mean(mean: Tensor, weight: Any) -> Tensor:
    """`mean * weight`; 0 where nothing counts, since a mean over no target is NaN."""
    total = mean * weight
    return torch.where(weight == 0, 0.0, total) if isinstance(weight, Tensor) else total
