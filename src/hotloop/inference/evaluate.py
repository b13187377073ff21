"""Evaluates a trained network on a data set: figures, and for a classifier confusions and worst mistakes.

For a regression the errors and residuals are collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.training import Evaluation, Mistake, Picture
from hotloop.data.batch_tree import batch_inputs
from hotloop.data.sources import Source, Stream, evaluation_source
from hotloop.data.splits import prepare_source
from hotloop.errors import DataError
from hotloop.inference.metrics import RegressionErrors, class_metrics
from hotloop.inference.predict import ChosenWeights, Progress
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.failures.explanation import explain_error
from hotloop.lowering.program import Program
from hotloop.task import StepResult

EVALUATED_PARTS = ("test", "validation", "train")

MAX_CLASSES = 1000
"""Largest number of classes with a confusion matrix, whose size grows with the square."""

MAX_MISTAKES = 24

_TOP = 5
"""Scores that count for the top-k accuracy, of classifications with more classes."""

_MAX_SIDE_PX = 128
"""Largest side of a stored picture in pixels; larger pictures are subsampled."""


def evaluate_weights(
    program: Program,
    chosen: ChosenWeights,
    *,
    run: str,
    on: str | None = None,
    data: Any = None,
    classes: Sequence[str] = (),
    targets: Sequence[str] = (),
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluates weights on a part of the Task's data, or on the caller's data.

    Raises:
        DataError: the part doesn't exist.
        CheckpointError: the weights belong to another model.

    Args:
        classes, targets: names of the classes, or of a regression's targets.
    """
    with preserve_generators(*program.devices):
        program.restore_weights(chosen.state)
        program.position = chosen.state.position
        name, source = choose_data(program.parts, on, data)
        task = program.parts.task
        evaluator = Evaluator(task.objective.ignore_index)
        regression = RegressionErrors(task.loss)
        total = None if isinstance(source, Stream) else len(source)

        def watch(batch: Any, samples: int, computed: StepResult) -> None:
            evaluator(batch, samples, computed)
            if computed.output is not None and not computed.classified:
                regression.add(computed.output, batch[-1])
            if progress is not None:
                progress(evaluator.samples, total)

        try:
            figures = evaluate(program, source, watch)
        except Exception as error:
            raise explain_error(error, program, None, name) from error
    metrics = {name: value for name, value in figures.values.items() if name != "loss"}
    return Evaluation(
        run=run,
        on=name,
        weights=chosen.weights,
        epoch=chosen.epoch,
        samples=figures.samples,
        loss=figures.values["loss"],
        metrics=metrics,
        **(evaluator.findings(classes) or regression.findings(targets)),
    )


def choose_data(parts: LoweringContext, on: str | None, data: Any) -> tuple[str, Source]:
    """Returns `(name, source)` of the data to evaluate on; by default test data, else validation data."""
    splits = parts.splits
    if data is not None:
        if on is not None:
            raise DataError(f"both data and on={on!r}", expected="one of them", fix="leave one out")
        task = parts.task
        given = evaluation_source(data, "data", collate=task.collate, batch_size=task.batch_size)
        return "data", prepare_source(given, "data", splits.prepare, splits.seed)
    if on is None:
        on = "test" if splits.has_test else "validation"
        if on == "validation" and splits.validation is None:
            raise DataError(
                "the Task has neither test nor validation data",
                expected="either",
                fix="evaluate on train, or pass data",
            )
    if on not in EVALUATED_PARTS:
        raise DataError(f"no data is called {on!r}", expected=" or ".join(EVALUATED_PARTS), fix="check the spelling")
    source = getattr(splits, on)
    if source is None:
        raise DataError(
            f"the Task has no {on} data", expected="some", fix=f"give the Task {on} data, or choose another part"
        )
    return on, source


class Evaluator:
    """Counts a classifier's confusions during an evaluation, and stores the worst mistakes.

    Its memory is independent of the data: one matrix, and the `limit` most confident mistakes with their inputs.
    """

    def __init__(self, ignored: int | None = None, limit: int = MAX_MISTAKES) -> None:
        self.ignored, self.limit = ignored, limit
        self.samples = self.classes = 0
        self._counts: Tensor | None = None
        self._top_hits: Tensor | int = 0
        self._counted: Tensor | int = 0
        self._worst: dict[str, Tensor] = {}

    def __call__(self, batch: Any, samples: int, computed: StepResult) -> None:
        if computed.classified:
            self._count_batch(batch_inputs(batch), computed.output, batch[-1])
        self.samples += samples

    def _count_batch(self, inputs: Any, output: Tensor, target: Tensor) -> None:
        self.classes = output.shape[1]
        confidence, predicted = output.float().softmax(dim=1).max(dim=1)
        counted = (target >= 0) & (target < self.classes)
        if self.ignored is not None:
            counted &= target != self.ignored
        if self.classes > _TOP:
            top = output.topk(_TOP, dim=1).indices
            self._top_hits += ((top == target.unsqueeze(1)).any(dim=1) & counted).sum()
            self._counted += counted.sum()
        if self.classes <= MAX_CLASSES:
            pairs = (target * self.classes + predicted)[counted]
            counts = pairs.bincount(minlength=self.classes**2)
            self._counts = counts if self._counts is None else self._counts + counts
        if target.ndim == 1:
            wrong = counted & (predicted != target)
            rows = {
                "confidence": torch.where(wrong, confidence.nan_to_num(0.0), -1.0),
                "index": self.samples + torch.arange(len(target), device=target.device),
                "true": target,
                "predicted": predicted,
                **_pictures_of_inputs(inputs),
            }
            rows = _most_confident(rows, self.limit)
            self._worst = _most_confident(_concatenate(self._worst, rows), self.limit) if self._worst else rows

    def findings(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the fields of an `Evaluation` for a classification; empty for other Tasks."""
        if not self.classes:
            return {}
        classes = [*names[: self.classes], *map(str, range(len(names), self.classes))]
        found: dict[str, Any] = {"classes": classes, "mistakes": self._mistakes()}
        if int(self._counted):
            found["top_5_accuracy"] = int(self._top_hits) / int(self._counted)
        if self._counts is None:
            note = (
                f"{self.classes:,} classes are more than the {MAX_CLASSES:,} for which a confusion matrix, precision,"
                " recall and F1 are computed"
            )
            return found | {"note": note}
        confusion = self._counts.view(self.classes, self.classes).tolist()
        rates = [row[place] / sum(row) if any(row) else None for place, row in enumerate(confusion)]
        metrics = class_metrics(self._counts.view(self.classes, self.classes))
        return found | metrics | {"confusion": confusion, "accuracy_per_class": rates}

    def _mistakes(self) -> list[Mistake]:
        if not self._worst:
            return []
        rows = {name: values[self._worst["confidence"] >= 0].cpu() for name, values in self._worst.items()}
        pictures = rows.pop("pictures", None)
        shown = [None] * len(rows["index"]) if pictures is None else to_pictures(pictures)
        lists = {name: values.tolist() for name, values in rows.items()}
        return [
            Mistake(**{name: values[place] for name, values in lists.items()}, picture=picture)
            for place, picture in enumerate(shown)
        ]


def _most_confident(rows: dict[str, Tensor], limit: int) -> dict[str, Tensor]:
    worst = rows["confidence"].argsort(descending=True, stable=True)[:limit]
    return {name: values[worst] for name, values in rows.items()}


def _concatenate(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenates the rows of both; pictures of unequal sizes are dropped."""
    same = [name for name in one if name in other and one[name].shape[1:] == other[name].shape[1:]]
    return {name: torch.cat([one[name], other[name]]) for name in same}


def _pictures_of_inputs(inputs: Any) -> dict[str, Tensor]:
    """Returns inputs (batch, channels, height, width) that are pictures, subsampled; empty for other inputs."""
    if not isinstance(inputs, Tensor) or inputs.ndim not in (3, 4) or inputs.is_complex():
        return {}
    images = inputs if inputs.ndim == 4 else inputs.unsqueeze(1)
    height, width = images.shape[2:]
    if images.shape[1] not in (1, 3) or min(height, width) < 4 or max(height, width) > 8 * min(height, width):
        return {}
    step = -(-max(height, width) // _MAX_SIDE_PX)
    return {"pictures": images[:, :, ::step, ::step]}


def to_pictures(images: Tensor) -> list[Picture]:
    """Returns images (N, channels, height, width) as pictures.

    uint8 values stay unchanged, and floats from 0 to 1 are scaled. Other values count as standardised: each channel's
    range over all images becomes the range of a byte.
    """
    if images.dtype != torch.uint8 and len(images):
        values = images.to(torch.float64)
        low, high = values.amin(dim=(0, 2, 3), keepdim=True), values.amax(dim=(0, 2, 3), keepdim=True)
        if images.is_floating_point() and low.min() >= 0 and high.max() <= 1:
            low, high = torch.zeros_like(low), torch.ones_like(high)
        images = ((values - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    _, channels, height, width = images.shape
    rows = images.permute(0, 2, 3, 1).contiguous().numpy()
    return [Picture(height=height, width=width, channels=channels, pixels=row.tobytes()) for row in rows]
