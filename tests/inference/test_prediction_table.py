"""Predictions as a CSV table: names and order of the columns, and probabilities."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from hotloop.errors import DataError
from hotloop.inference.prediction_table import OutputColumns, class_probabilities, prediction_table

SCORES = np.array([[0.0, 2.0, 1.0], [800.0, 1.0, 0.0]], np.float32)


def test_classes_and_probabilities(tmp_path) -> None:
    table = prediction_table(SCORES, OutputColumns(classes=("cat", "dog, big", "ant")), ["a.png", "b.png"])
    table.write(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "class", "probability_cat", "probability_dog, big", "probability_ant"]
    assert [row["class"] for row in rows] == ["dog, big", "cat"] and rows[1]["file"] == "b.png"
    expected = np.exp(SCORES[0]) / np.exp(SCORES[0]).sum()
    found = [float(value) for value in list(rows[0].values())[2:]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert table.columns["class"] == "the most probable class"


def test_probabilities_and_their_logarithms_stay_what_they_are() -> None:
    probabilities = class_probabilities(SCORES).astype(np.float32)[:1]
    np.testing.assert_allclose(class_probabilities(probabilities), probabilities, rtol=1e-6)
    np.testing.assert_allclose(class_probabilities(np.log(probabilities)), probabilities, rtol=1e-5)


def test_targets_of_a_regression() -> None:
    table = prediction_table(np.array([[1.5], [2.0]], np.float32), OutputColumns(targets=("price",)), [])
    assert list(table.columns) == ["row", "price"] and table.rows == [["1", "1.5"], ["2", "2"]]


@pytest.mark.parametrize(
    ("shape", "classes", "targets", "has_class_scores", "expected"),
    [
        ((5, 3), ["a", "b", "c"], (), True, ("a", "b", "c")),
        ((5, 3), [], (), True, ("0", "1", "2")),
        ((5, 3), [], (), False, ("output_0", "output_1", "output_2")),
        ((5, 2), ["a", "b", "c"], (), True, ("output_0", "output_1")),
        ((5, 2), [], ("x", "y"), False, ("x", "y")),
        ((5, 1), [], ("price",), False, ("price",)),
        ((5,), [], ("price",), False, ("price",)),
        ((5,), [], (), False, ("output",)),
    ],
)
def test_names_of_columns(shape, classes, targets, has_class_scores, expected) -> None:
    found = OutputColumns.of(shape, classes, targets, has_class_scores)
    assert found.classes + found.targets == expected
    assert bool(found.classes) == (expected[0] in ("a", "0"))


def test_outputs_without_a_row_of_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="--format npy"):
        prediction_table(np.zeros((2, 3, 4)), OutputColumns(), [])
