"""Properties of a loss: cross entropy or not, ignored targets, class weights and reduction."""

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
