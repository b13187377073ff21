"""Writes predictions as a CSV table with named columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotloop.core.files.atomic_files import write_atomic
from hotloop.errors import DataError

PROBABILITY = "probability_"
"""Start of the name of a class's column."""

_SUM_TOLERANCE = 1e-4
"""Largest distance of a sample's probabilities from the sum 1, in float32."""


@dataclass(frozen=True)
class OutputColumns:
    """What the columns of a model's output are.

    Attributes:
        classes: names of the classes; empty for other outputs.
        targets: names of a regression's targets, or `output`, `output_0` and so on; empty for classes.
    """

    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, shape: Sequence[int], classes: Sequence[str], targets: Sequence[str], has_class_scores: bool
    ) -> OutputColumns:
        """Returns the columns of outputs with this shape (N, ...).

        Args:
            classes, targets: names from the run; empty if unknown.
            has_class_scores: whether the outputs are class scores, also without names.
        """
        width = shape[1] if len(shape) == 2 else 1 if len(shape) == 1 else 0
        if len(shape) == 2 and width > 1 and len(classes) == width:
            return cls(classes=tuple(classes))
        if len(shape) == 2 and width > 1 and has_class_scores and not classes:
            return cls(classes=tuple(map(str, range(width))))
        if width and len(targets) == width:
            return cls(targets=tuple(targets))
        return cls(targets=("output",) if width == 1 else tuple(f"output_{place}" for place in range(width)))


@dataclass(frozen=True)
class PredictionTable:
    """A table with a row per sample.

    Attributes:
        columns: name -> meaning.
        rows: the cells of each sample.
    """

    columns: dict[str, str]
    rows: list[list[str]]

    def write(self, path: Path) -> None:
        stream = io.StringIO(newline="")
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        write_atomic(path, stream.getvalue())


def prediction_table(scores: np.ndarray, outputs: OutputColumns, names: Sequence[str]) -> PredictionTable:
    """Returns a table of outputs (N,) or (N, columns).

    Args:
        names: name of each sample, such as an image's file; empty for row numbers from 1.

    Raises:
        DataError: outputs of another shape, or complex numbers.
    """
    if scores.ndim not in (1, 2) or scores.dtype.kind not in "biuf":
        raise DataError(
            f"the model's output is {scores.dtype} of shape {tuple(scores.shape)}",
            expected="a row of numbers for each sample in a CSV file",
            fix="choose --format npy",
        )
    first = {"file": "the image"} if names else {"row": "number of the sample, from 1"}
    labels = list(names) or [str(number + 1) for number in range(len(scores))]
    if outputs.classes:
        probabilities = class_probabilities(scores)
        found = [outputs.classes[number] for number in probabilities.argmax(axis=1)]
        columns = first | {"class": "the most probable class"}
        columns |= {f"{PROBABILITY}{name}": f"probability of {name}" for name in outputs.classes}
        cells = [[label, name, *row] for label, name, row in zip(labels, found, _texts(probabilities), strict=True)]
        return PredictionTable(columns, cells)
    columns = first | dict.fromkeys(outputs.targets, "the model's output")
    cells = [[label, *row] for label, row in zip(labels, _texts(scores.reshape(len(scores), -1)), strict=True)]
    return PredictionTable(columns, cells)


def class_probabilities(scores: np.ndarray) -> np.ndarray:
    """Returns float64 (N, classes): the softmax of scores or log-probabilities; probabilities stay unchanged."""
    values = scores.astype(np.float64)
    is_probability = (values >= 0).all() and (abs(values.sum(axis=1) - 1) <= _SUM_TOLERANCE).all()
    if is_probability:
        return values
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _texts(values: np.ndarray) -> list[list[str]]:
    if values.dtype.kind != "f":
        return [[str(value) for value in row] for row in values.tolist()]
    return [[f"{value:.7g}" for value in row] for row in values.tolist()]
