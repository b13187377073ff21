"""Metrics of an evaluation, computed by scikit-learn: precision, recall and F1 of classes, errors of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.core.records.training import ClassAverage, Regression, TargetErrors

_MAX_VALUES = 10_000_000
"""Largest number of predictions that are stored for the errors of a regression: 80 MB with their targets."""

_MAX_TARGETS = 64
"""Largest number of outputs that count as a regression's targets; wider outputs are images, mostly."""

_MAX_POINTS = 2_000
"""Samples in the picture of predictions, evenly spaced over the data."""

_BINS = 30

_OTHER_LOSSES = (
    *(nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.PoissonNLLLoss),
    *(nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss, nn.HingeEmbeddingLoss),
)
"""Losses of outputs that are scores or logarithms, and no estimates of the targets."""


def class_metrics(confusion: Tensor) -> dict[str, Any]:
    """Returns precision, recall and F1 per class, and their averages, as fields of an `Evaluation`.

    Only classes among the targets or the predictions count, as in scikit-learn; others have None. A precision without
    predictions and a recall without targets are 0.

    Args:
        confusion: int64 (classes, classes), `confusion[true, predicted]`.
    """
    from sklearn.metrics import precision_recall_fscore_support  # takes a second

    counts = confusion.cpu().numpy()
    true, predicted = np.nonzero(counts)
    if not len(true):
        return {}
    present = np.union1d(true, predicted)

    def figures(average: str | None) -> Any:
        return precision_recall_fscore_support(
            true, predicted, labels=present, sample_weight=counts[true, predicted], average=average, zero_division=0
        )[:3]

    found: dict[str, Any] = {}
    for name, values in zip(("precision", "recall", "f1"), figures(None), strict=True):
        by_class = dict(zip(present.tolist(), values.tolist(), strict=True))
        found[f"{name}_per_class"] = [by_class.get(number) for number in range(len(counts))]
    for average in ("macro", "weighted"):
        precision, recall, f1 = map(float, figures(average))
        found[f"{average}_average"] = ClassAverage(precision=precision, recall=recall, f1=f1)
    return found


class RegressionErrors:
    """Collects predictions and targets of a regression, as float32 on the CPU."""

    def __init__(self, loss: Any) -> None:
        self.is_possible = not isinstance(loss, _OTHER_LOSSES)
        self.is_too_large = False
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._values = 0

    def add(self, output: Any, target: Any) -> None:
        """Adds a batch; outputs or targets of another form than (N,) or (N, targets) end the collection."""
        if not self.is_possible or self.is_too_large:
            return
        if not _is_regression(output, target):
            self.is_possible = False
            self._pairs.clear()
            return
        rows = [value.detach().reshape(len(value), -1).to("cpu", torch.float32) for value in (output, target)]
        self._values += rows[0].numel()
        if self._values > _MAX_VALUES:
            self.is_too_large = True
            self._pairs.clear()
            return
        self._pairs.append((rows[0], rows[1]))

    def findings(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the fields of an `Evaluation`; empty if the Task is no regression."""
        if self.is_too_large:
            return {"note": f"more than {_MAX_VALUES:,} predictions: MAE, RMSE, R² and residuals are left out"}
        if not self._pairs:
            return {}
        predicted, true = (torch.cat(part).double().numpy() for part in zip(*self._pairs, strict=True))
        if np.isin(true, (0.0, 1.0)).all():
            return {}  # labels of a binary classification
        if not np.isfinite(predicted).all():
            count = int((~np.isfinite(predicted)).any(axis=1).sum())
            return {"note": f"{count:,} of {len(predicted):,} predictions are NaN or infinite: no MAE, RMSE and R²"}
        width = predicted.shape[1]
        default = ["target"] if width == 1 else [f"target {number}" for number in range(width)]
        return {"regression": _regression(predicted, true, list(names) if len(names) == width else default)}


def _is_regression(output: Any, target: Any) -> bool:
    return (
        all(
            isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (1, 2)
            for value in (output, target)
        )
        and len(output) == len(target)
        and output.numel() == target.numel() <= _MAX_TARGETS * len(output)
    )


def _regression(predicted: np.ndarray, true: np.ndarray, names: list[str]) -> Regression:
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    def figures(output: np.ndarray, target: np.ndarray) -> dict[str, float | None]:
        return {
            "mae": float(mean_absolute_error(target, output)),
            "rmse": float(root_mean_squared_error(target, output)),
            "r2": float(r2_score(target, output)) if len(target) > 1 else None,
        }

    shown = np.linspace(0, len(true) - 1, min(_MAX_POINTS, len(true))).round().astype(int)
    targets = []
    for place, name in enumerate(names):
        residuals = true[:, place] - predicted[:, place]
        samples, edges = np.histogram(residuals, bins=_BINS)
        targets.append(
            TargetErrors(
                name=name,
                **figures(predicted[:, place], true[:, place]),  # type: ignore[arg-type]
                residual_mean=float(residuals.mean()),
                residual_std=float(residuals.std()),
                histogram_edges=edges.tolist(),
                histogram_samples=samples.tolist(),
                true=true[shown, place].tolist(),
                predicted=predicted[shown, place].tolist(),
            )
        )
    return Regression(**figures(predicted, true), targets=targets)  # type: ignore[arg-type]
