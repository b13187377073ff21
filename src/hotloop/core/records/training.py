"""Records of runs, evaluations and exports: frozen, versioned, with units, readable without torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A frozen model with a lossless JSON form."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows; None for records without a view."""
        import_module(_VIEWS_MODULE)
        view = next((HTML_VIEWS[kind] for kind in type(self).__mro__ if kind in HTML_VIEWS), None)
        return None if view is None else view(self)


HTML_VIEWS: dict[type, Callable[[Any], str]] = {}
"""Views of records in notebooks, by class."""

_VIEWS_MODULE = "hotloop.report.notebook"
"""Module that fills `HTML_VIEWS`: imported by name and at first use, as views draw with plotly and stand above records."""


class EpochRecord(Record):
    """One epoch.

    Attributes:
        epoch: from 1.
        step: steps since the beginning of the run.
        train: `loss` and further scalars, averaged over the epoch's steps.
        validation: `loss` and metrics after the epoch; empty without validation data.
        learning_rate: of the first parameter group, at the end of the epoch.
        samples: in the batches; `train` excludes those that `collate` dropped.
        seconds: training and validation, without checkpoints.
        samples_per_s: of training alone.
    """

    epoch: int
    step: int
    train: dict[str, float]
    validation: dict[str, float] = {}
    learning_rate: float
    samples: int
    seconds: float
    samples_per_s: float

    def flat(self) -> dict[str, Any]:
        """Returns all fields in one level, with names such as `train_loss` and `validation_accuracy`."""
        named: dict[str, float | None] = {f"train_{key}": value for key, value in self.train.items()}
        named |= {"validation_loss": None, "validation_accuracy": None}
        named |= {f"validation_{key}": value for key, value in self.validation.items()}
        rest = self.model_dump(exclude={"train", "validation", "epoch", "step"})
        return {"epoch": self.epoch, "step": self.step, **named, **rest}

    def figure(self, name: str) -> float | None:
        """Returns a monitored figure, such as `validation_loss`."""
        value = self.flat().get(name)
        return None if value is None else float(value)


class Figures(Record):
    """`loss` and metrics of a data set, and the number of samples."""

    samples: int
    values: dict[str, float]


class TaskFacts(Record):
    """Properties of a Task that need no long run.

    Attributes:
        parameters, trainable: numbers of elements; shared parameters count once.
        samples: of the training data; None for a stream.
        batches: per epoch.
        inputs: shapes of one sample's tensors.
        data: `Table`, `Samples` or `Stream`.
        exact: whether a resumed run equals an uninterrupted run bit by bit.
        inexact: reasons why `exact` is False; empty for data with an order of its own.
        order: hash of everything that determines the order and the splits of the data.
        fingerprint: hash of source, model, optimizer and sizes, independent of the seed.
        optimizer: its class; of several, each with its name.
        optimizers: names of several optimizers, which the step updates in turn; empty for one.
        implementations: those of `forloop`, `foreach` and `fused` that the optimizer supports.
        one_operation: whether the update is one operation per parameter, as of SGD without momentum and decay.
        not_fused: why the fused optimizer can't update this model; empty otherwise.
        closure: whether the optimizer calls the loss itself, as LBFGS does.
        images: whether an input or a parameter has 4 or 5 dimensions.
        convolutions: whether a parameter has 4 or 5 dimensions.
        has_convolution_layers: whether layers or parameters show convolutions, also over sequences.
        normed: whether a torch layer normalises over the batch.
        recurrent: whether a torch layer is recurrent.
        drops: whether a torch layer drops numbers at random.
        data_bytes: of training data in memory.
        steps: of the whole run; None for a stream of unknown length.
    """

    version: int = 1
    parameters: int
    trainable: int
    samples: int | None
    batches: int | None
    batch_size: int
    inputs: list[list[int]]
    data: str
    exact: bool
    inexact: list[str] = []
    order: str = ""
    fingerprint: str
    optimizer: str = ""
    optimizers: list[str] = []
    implementations: list[str] = []
    one_operation: bool = False
    not_fused: str = ""
    closure: bool = False
    images: bool = False
    convolutions: bool = False
    has_convolution_layers: bool = False
    normed: bool = False
    recurrent: bool = False
    drops: bool = False
    data_bytes: int | None = None
    steps: int | None = None


class RunRecord(Record):
    """The description of a run folder (`run.json`).

    Attributes:
        id: of this run and its copies.
        source: how to load the Task from the folder; None for a Task made in Python.
        overrides: Task fields set by the command, such as `epochs`.
        checkpoint_every: `auto`, a number of steps, or seconds as `90s`.
        reader: how the Task's input files are read, with the statistics of the training data, and the `digest` of the
            files; empty for data without files.
        has_class_scores: whether the model's outputs are class scores, by the loss.
        switches: torch's float32 switches at the run's start, such as `cudnn.conv: tf32`.
        rehearsals: a line for each rehearsal of the resume, or why there was none.
        data: hash of the training, validation and test data.
        unknown_data: types of data whose samples `data` doesn't cover, such as a data set of the user's own.
    """

    version: int = 1
    id: str
    name: str
    created: str
    source: SourceRecord | None
    overrides: dict[str, Any] = {}
    facts: TaskFacts
    classes: list[str] = []
    note: str = ""
    checkpoint_every: str = "auto"
    reader: dict[str, Any] = {}
    has_class_scores: bool = False
    switches: dict[str, str] = {}
    rehearsals: list[str] = []
    data: str = ""
    unknown_data: list[str] = []
    versions: dict[str, str]


class SourceRecord(Record):
    """The location of a Task's source in a run folder.

    Attributes:
        file: the Task's file, relative to the folder's `source`.
        attribute: the Task's name in the file.
        parameters: arguments of a `task(...)` function.
        digest: SHA-256 of all source files.
        reference: as the user typed it.
        origin: the original folder.
    """

    file: str
    module: str
    attribute: str
    parameters: dict[str, Any] = {}
    digest: str
    reference: str
    origin: str


class Picture(Record):
    """An input as an image.

    Attributes:
        channels: 1 (grey) or 3 (RGB).
        pixels: `height * width * channels` bytes, row by row.
    """

    height: int
    width: int
    channels: int
    pixels: bytes


class Mistake(Record):
    """A wrong prediction of a classifier.

    Attributes:
        index: the sample's index in the data.
        true, predicted: class numbers.
        confidence: probability of the predicted class.
        picture: the input, if it is an image; excluded from JSON.
    """

    index: int
    true: int
    predicted: int
    confidence: float
    picture: Picture | None = Field(default=None, exclude=True, repr=False)


class ClassAverage(Record):
    """Precision, recall and F1, averaged over the classes."""

    precision: float
    recall: float
    f1: float


class TargetErrors(Record):
    """The errors of a regression in one target; a residual is `true - predicted`.

    Attributes:
        name: the target's name, or its number.
        mae, rmse: mean absolute error and root of the mean squared error, in the target's unit.
        r2: coefficient of determination; None for a single sample.
        histogram_edges: limits of the bins of residuals, one more than `histogram_samples`.
        true, predicted: evenly spaced samples for a picture; excluded from JSON.
    """

    name: str
    mae: float
    rmse: float
    r2: float | None
    residual_mean: float
    residual_std: float
    histogram_edges: list[float]
    histogram_samples: list[int]
    true: list[float] = Field(default=[], exclude=True, repr=False)
    predicted: list[float] = Field(default=[], exclude=True, repr=False)


class Regression(Record):
    """The errors of a regression: means over its targets, and those of each target."""

    mae: float
    rmse: float
    r2: float | None
    targets: list[TargetErrors]


class Evaluation(Record):
    """The figures of a trained network on a data set.

    Attributes:
        on: `test`, `validation`, `train`, or `data` for the caller's data.
        weights, epoch: `best` or `last`, and their epoch; 0 is an untrained network.
        metrics: the Task's, or the accuracy of a classification.
        classes: names by class number; this and the following fields are empty without classes.
        accuracy_per_class: share of each class's samples with correct predictions; None for a class without samples.
        precision_per_class, recall_per_class, f1_per_class: None for a class that neither targets nor predictions have.
        macro_average: the mean over the classes that targets or predictions have; None without a confusion matrix.
        weighted_average: the mean weighted by the classes' samples.
        top_5_accuracy: share of the samples whose class is among the five highest scores; None for fewer than 6 classes.
        regression: None for other Tasks.
        confusion: `confusion[true][predicted]`, numbers of samples (or classified pixels or positions).
        mistakes: the most confident wrong predictions, worst first.
        note: remarks, such as why there's no confusion matrix.
    """

    version: int = 1
    run: str
    on: str
    weights: str
    epoch: int
    samples: int
    loss: float
    metrics: dict[str, float]
    classes: list[str] = []
    accuracy_per_class: list[float | None] = []
    precision_per_class: list[float | None] = []
    recall_per_class: list[float | None] = []
    f1_per_class: list[float | None] = []
    macro_average: ClassAverage | None = None
    weighted_average: ClassAverage | None = None
    top_5_accuracy: float | None = None
    regression: Regression | None = None
    confusion: list[list[int]] = []
    mistakes: list[Mistake] = []
    note: str = ""


class ExportPort(Record):
    """An input or output of an exported file; `batch` in `shape` allows any number of samples."""

    name: str
    dtype: str
    shape: list[int | str]


class ExportRecord(Record):
    """An exported file, and its check.

    Attributes:
        file, format: the path, and `pt2`, `onnx`, `pt` or `safetensors`.
        weights, epoch: `best` or `last`, and their epoch.
        prepare: whether the file contains the Task's `prepare`; None without one, or for weights alone.
        inputs, outputs: empty for weights alone.
        batch_sizes: sizes of the real batches of the check.
        difference, tolerance: largest difference from the model's output, and its limit.
    """

    version: int = 1
    run: str
    file: str
    format: str
    size_bytes: int
    weights: str
    epoch: int
    prepare: bool | None
    inputs: list[ExportPort]
    outputs: list[ExportPort]
    batch_sizes: list[int]
    difference: float
    tolerance: float
    versions: dict[str, str]


RunRecord.model_rebuild()
