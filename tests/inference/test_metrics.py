"""Metrics of an evaluation against scikit-learn's functions of labels and predictions."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    mean_absolute_error,
    precision_recall_fscore_support,
    r2_score,
    root_mean_squared_error,
    top_k_accuracy_score,
)
from torch import Tensor, nn

import hotloop
from hotloop.inference.evaluate import Evaluator
from hotloop.inference.metrics import RegressionErrors
from hotloop.report.evaluation import residuals_figure
from hotloop.task import StepResult
from tests.support.programs import a_task, trained


def scores(samples: int = 300, classes: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Class scores and labels that agree more often than by chance."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (samples,), generator=draw)
    return torch.randn(samples, classes, generator=draw) + nn.functional.one_hot(target, classes), target


def findings(output: Tensor, target: Tensor, size: int = 64, ignored: int | None = None) -> dict:
    evaluator = Evaluator(ignored)
    for rows, labels in zip(output.split(size), target.split(size), strict=True):
        inputs = torch.zeros(len(labels), 2)
        evaluator((inputs, labels), len(labels), StepResult(torch.zeros(()), rows, {}, classified=True))
    return evaluator.findings()


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_precision_recall_and_f1_are_those_of_scikit_learn() -> None:
    output, target = scores()
    found, predicted = findings(output, target), output.argmax(1)
    per_class = precision_recall_fscore_support(target, predicted)[:3]
    for name, expected in zip(("precision", "recall", "f1"), per_class, strict=True):
        np.testing.assert_allclose(found[f"{name}_per_class"], expected)
    assert found["accuracy_per_class"] == pytest.approx(found["recall_per_class"])
    for average in ("macro", "weighted"):
        expected = precision_recall_fscore_support(target, predicted, average=average)[:3]
        average = found[f"{average}_average"]
        np.testing.assert_allclose((average.precision, average.recall, average.f1), expected)


def test_classes_without_samples_or_predictions_count_as_in_scikit_learn() -> None:
    output, target = scores(classes=6)
    output[:, 2] = -9  # never predicted
    output[:, 4] = -9  # neither predicted nor a target
    target[target == 4] = 1
    target[target == 5] = 3  # predicted, and no target
    found, predicted = findings(output, target), output.argmax(1)
    labels = sorted({*target.tolist(), *predicted.tolist()})
    assert labels == [0, 1, 2, 3, 5]
    expected = precision_recall_fscore_support(target, predicted, zero_division=0)[:3]
    assert found["precision_per_class"][4] is None and found["recall_per_class"][4] is None
    assert (found["precision_per_class"][2], found["recall_per_class"][5]) == (0, 0)
    np.testing.assert_allclose([found["f1_per_class"][label] for label in labels], expected[2])
    macro = precision_recall_fscore_support(target, predicted, zero_division=0, average="macro")[:3]
    average = found["macro_average"]
    np.testing.assert_allclose((average.precision, average.recall, average.f1), macro)


def test_ignored_targets_count_nowhere() -> None:
    output, target = scores()
    target[::3] = -100
    kept = target >= 0
    found, expected = findings(output, target, ignored=-100), findings(output[kept], target[kept])
    for name in ("f1_per_class", "macro_average", "top_5_accuracy"):
        assert found[name] == expected[name]
    everything = findings(output, torch.full_like(target, -100), ignored=-100)
    assert "macro_average" not in everything and "top_5_accuracy" not in everything


@pytest.mark.parametrize("classes", [6, 8, 20])
def test_top_5_accuracy_is_that_of_scikit_learn(classes) -> None:
    output, target = scores(classes=classes)
    expected = top_k_accuracy_score(target, output, k=5, labels=range(classes))
    assert findings(output, target)["top_5_accuracy"] == pytest.approx(expected)


def test_few_classes_have_no_top_5_accuracy() -> None:
    assert "top_5_accuracy" not in findings(*scores(classes=5))


def test_top_5_accuracy_of_positions() -> None:
    output, target = scores(classes=7)
    whole = findings(output, target)["top_5_accuracy"]
    by_position = findings(output.view(100, 3, 7).transpose(1, 2), target.view(100, 3))
    assert by_position["top_5_accuracy"] == pytest.approx(whole)


# --- regression


def estimates(targets: int, samples: int = 200) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(samples, targets, generator=draw) * 3 + 1
    return target + torch.randn(samples, targets, generator=draw), target


def errors(output: Tensor, target: Tensor, loss=None, names=(), size: int = 64) -> dict:
    collected = RegressionErrors(loss)
    for rows, wanted in zip(output.split(size), target.split(size), strict=True):
        collected.add(rows, wanted)
    return collected.findings(names)


@pytest.mark.parametrize("targets", [1, 3])
def test_errors_of_a_regression_are_those_of_scikit_learn(targets) -> None:
    output, target = estimates(targets)
    found = errors(output, target)["regression"]
    functions = {"mae": mean_absolute_error, "rmse": root_mean_squared_error, "r2": r2_score}
    for name, function in functions.items():
        assert getattr(found, name) == pytest.approx(function(target, output), rel=1e-5)
        by_target = function(target, output, multioutput="raw_values")
        np.testing.assert_allclose([getattr(one, name) for one in found.targets], by_target, rtol=1e-5)
    residuals = (target - output)[:, 0]
    assert found.targets[0].residual_mean == pytest.approx(float(residuals.mean()), abs=1e-5)
    assert sum(found.targets[0].histogram_samples) == len(residuals)
    assert len(found.targets[0].histogram_edges) == len(found.targets[0].histogram_samples) + 1


def test_names_and_forms_of_targets() -> None:
    output, target = estimates(1)
    expected = errors(output, target)["regression"]
    assert [one.name for one in expected.targets] == ["target"]
    assert errors(output, target, names=["price"])["regression"].targets[0].name == "price"
    for shapes in ((output[:, 0], target), (output, target[:, 0]), (output[:, 0], target[:, 0])):
        assert errors(*shapes)["regression"] == expected


def test_a_single_sample_has_no_r2_and_constant_targets_no_warning() -> None:
    found = errors(torch.tensor([[2.0]]), torch.tensor([[3.0]]))["regression"]
    assert (found.mae, found.r2) == (1, None)
    assert errors(torch.ones(5, 1) * 2, torch.ones(5, 1) * 3)["regression"].r2 == 0


def test_other_tasks_have_no_errors_of_a_regression() -> None:
    output, target = estimates(2)
    assert errors(output, (target > 0).float()) == {}  # labels
    assert errors(output, target.softmax(1), nn.CrossEntropyLoss()) == {}
    assert errors(output, target.long()) == {}
    assert errors(output.view(50, 2, 2, 2), target.view(50, 2, 2, 2)) == {}
    assert errors(output[:, :1], target) == {}
    assert "1 of 200 predictions are NaN" in errors(output.index_fill(0, torch.tensor([3]), torch.nan), target)["note"]


def test_a_regression_is_evaluated_with_a_picture(tmp_path) -> None:
    x, _ = estimates(6)
    y = x[:, :2] * 2
    task = a_task(
        data=(x, y),
        test=(x, y),
        model=lambda: nn.Linear(6, 2),
        loss=lambda output, target: (output - target).square().mean(),
    )
    run = trained(task, tmp_path / "run")
    found = hotloop.evaluate(run)
    assert found.regression.mae == pytest.approx(float(np.abs(hotloop.predict(run, x) - y.numpy()).mean()), rel=1e-4)
    figure = residuals_figure(found)
    assert [trace.type for trace in figure.data] == ["scatter", "scatter", "bar"] * 2
    assert tuple(figure.data[1].x) == pytest.approx(y[:, 0].tolist())
    document = json.loads(found.model_dump_json())["regression"]
    assert document["targets"][1]["name"] == "target 1" and "predicted" not in document["targets"][0]
