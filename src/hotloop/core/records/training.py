"""Frozen, versioned records of what was seen, with units. They need no torch to be read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A frozen value that goes to JSON and back without loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EpochRecord(Record):
    """One pass over the training data.

    Attributes:
        epoch: from 1.
        step: steps done since the beginning of the run.
        train: `loss` and further scalars, averaged over the epoch while training went on.
        validation: `loss` and metrics after the epoch; empty without validation data.
        learning_rate: of the first parameter group, at the end of the epoch.
        samples: how many the batches were made of; `collate` may have left some out, which `train` doesn't count.
        seconds: training and validation, without checkpoints.
        samples_per_s: training alone.
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
        """`train_loss`, `validation_loss`, `validation_accuracy` and so on beside the rest, in one level."""
        named: dict[str, float | None] = {f"train_{key}": value for key, value in self.train.items()}
        named |= {"validation_loss": None, "validation_accuracy": None}
        named |= {f"validation_{key}": value for key, value in self.validation.items()}
        rest = self.model_dump(exclude={"train", "validation", "epoch", "step"})
        return {"epoch": self.epoch, "step": self.step, **named, **rest}

    def figure(self, name: str) -> float | None:
        """A monitored figure such as `validation_loss`."""
        value = self.flat().get(name)
        return None if value is None else float(value)


class Figures(Record):
    """`loss` and metrics of one data set, and how many samples they are over."""

    samples: int
    values: dict[str, float]


class TaskFacts(Record):
    """What is known of a Task without running it for long.

    Attributes:
        parameters, trainable: numbers of parameters; shared ones count once.
        samples: of the training data; None for a stream.
        batches: in an epoch.
        inputs: shapes of one sample's tensors.
        data: its form: `Table`, `Samples` or `Stream`.
        exact: whether a resumed run equals an uninterrupted run bit by bit: order and draws follow from the seed alone, and
            all that training changes is saved.
        inexact: why `exact` is False, one line for each reason; empty for data with an order of its own.
        order: hash of what decides the order of the data and which of it is held out.
        fingerprint: hash of the source, of what model and optimizer show of themselves, and of the sizes above, whatever
            the seed.
        optimizer: its class; of several, each with its name.
        optimizers: the names of several optimizers, which the step updates in turn; empty for one.
        implementations: those of `forloop`, `foreach` and `fused` that the optimizer can be switched to.
        one_operation: whether the update is a single one for each parameter, as that of SGD without momentum and decay.
        not_fused: why the optimizer's fused form can't update this model; empty if it can, or there is none.
        closure: whether the optimizer asks for the loss itself, as LBFGS does.
        images: whether an input or a parameter has the 4 or 5 dimensions of images.
        convolutions: whether a parameter has them.
        has_convolution_layers: whether the model convolves, over sequences too, as far as its layers and parameters show.
        normed: whether a layer of torch's normalises over the batch.
        recurrent: whether a layer is one of torch's recurrent ones.
        drops: whether a layer of torch's drops numbers at random.
        data_bytes: of the training data, where it lies in memory as arrays.
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
    """What a run folder says of itself (`run.json`).

    Attributes:
        id: of this run, which its copies share; empty in runs of versions before ids.
        source: how to load the Task from the folder; None for a Task made in Python, which only Python can give again.
        overrides: Task fields set by the command, such as `epochs`.
        checkpoint_every: `auto`, a number of steps, or seconds as `90s`.
        switches: torch's switches of the format in which products are computed, as the process had them when the run
            began, such as `cudnn.conv: tf32`; empty in runs of versions that recorded none.
    """

    version: int = 1
    id: str = ""
    name: str
    created: str
    source: SourceRecord | None
    overrides: dict[str, Any] = {}
    facts: TaskFacts
    classes: list[str] = []
    note: str = ""
    checkpoint_every: str = "auto"
    switches: dict[str, str] = {}
    versions: dict[str, str]


class SourceRecord(Record):
    """Where a Task's source lies in a run folder.

    Attributes:
        file: the Task's file, relative to the folder's `source`.
        module: its dotted name.
        attribute: the Task's name in it.
        parameters: arguments for a `task(...)` that is a function.
        digest: SHA-256 of all source files.
        reference: what the user typed.
        origin: the folder that the source was in.
    """

    file: str
    module: str
    attribute: str
    parameters: dict[str, Any] = {}
    digest: str
    reference: str
    origin: str


class Picture(Record):
    """An input as a picture.

    Attributes:
        channels: 1 for grey, 3 for red, green and blue.
        pixels: `height * width * channels` bytes, row by row.
    """

    height: int
    width: int
    channels: int
    pixels: bytes


class Mistake(Record):
    """A wrong answer of a classifier.

    Attributes:
        index: the sample's place in the data, from 0.
        true, predicted: class numbers.
        confidence: probability that the model gave to its answer.
        picture: the input, if it is an image; it stays out of JSON.
    """

    index: int
    true: int
    predicted: int
    confidence: float
    picture: Picture | None = Field(default=None, exclude=True, repr=False)


class Evaluation(Record):
    """A trained network on a data set.

    Attributes:
        run: the run's folder.
        on: `test`, `validation`, `train`, or `data` for data of the caller's.
        weights: `best` or `last`; `epoch` is the epoch they are of, and 0 that of an untrained network.
        samples: how many there were.
        metrics: the Task's, or the accuracy of a classification.
        classes: names, in the order of their numbers; this and what follows is empty where there are no classes.
        accuracy_per_class: share of each class's samples that were told; None for a class without samples.
        confusion: `confusion[true][predicted]` counts samples (pixels or positions, if those are classified).
        mistakes: the most confident wrong answers, worst first.
        note: what there is to know, such as why there's no confusion matrix.
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
    confusion: list[list[int]] = []
    mistakes: list[Mistake] = []
    note: str = ""


class ExportPort(Record):
    """An input or output of an exported file; `shape` has `batch` where any number of samples fits."""

    name: str
    dtype: str
    shape: list[int | str]


class ExportRecord(Record):
    """A file that a trained network was written to, and how it was checked.

    Attributes:
        run: the run's folder.
        file, format: where, and `pt2`, `onnx`, `pt` or `safetensors`.
        weights: `best` or `last`; `epoch` is the epoch they are of.
        prepare: whether the Task's `prepare` is in the file; None where it has none, or the file holds weights alone.
        inputs, outputs: what the file takes and gives; empty for weights alone.
        batch_sizes: sizes of the real batches that the loaded file was run on.
        difference: largest difference to the model's own output on them.
        tolerance: what it may be.
        versions: of what wrote it.
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
