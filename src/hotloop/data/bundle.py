"""A data set with its parts, classes and preprocessing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hotloop.errors import DataError

Pair = tuple[Tensor, Tensor]


class InputReader(Protocol):
    """Reads new inputs from a user's files in the same way as the training data.

    Attributes:
        kind: `images` or `csv`.
        targets: names of the columns of a regression's targets; empty for classes.
        prepare: preprocessing of the read inputs, with the statistics of the training data.
    """

    @property
    def kind(self) -> str: ...

    @property
    def targets(self) -> tuple[str, ...]: ...

    @property
    def prepare(self) -> Callable[[Tensor], Tensor]: ...

    def read(self, path: Path, say: Callable[[str], None]) -> Any:
        """Returns raw inputs with an array's interface of rows."""

    def names(self, path: Path) -> list[str]:
        """Returns a name for each input of `read`; empty if the inputs have numbers alone."""

    def to_json(self) -> dict[str, Any]:
        """Returns the reader as a JSON document for the run folder."""


@dataclass(frozen=True, eq=False, repr=False)
class Bundle:
    """A raw data set, mostly in memory, on the CPU.

    Args:
        name: the data set's name, such as "Fashion-MNIST".
        train: `(x, y)`: raw inputs of shape (N, ...) and labels of shape (N,), or targets of shape (N, targets). A set
            of many images is a map-style data set.
        validation: the same for early stopping and model choice, or None.
        test: the same for the final metrics, or None.
        classes: the name of each label, in order.
        prepare: turns a batch of raw inputs into float32 model input, sample by sample, on its device.
        note: a remark for the user, such as "these are the digits, because ..."; mostly "".
        reader: reads new inputs from files of the training data's kind, for `predict`; None for built-in sets.
        digest: hash of the files; a run's later use refuses changed files. "" for built-in sets.
        inputs: names of the columns of the inputs; empty for images.
    """

    name: str
    train: Pair
    validation: Pair | None
    test: Pair | None
    classes: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Tensor] | None = None
    note: str = ""
    reader: InputReader | None = None
    digest: str = ""
    inputs: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        """Returns the number of samples of each part."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: len(pair[1]) if pair else 0 for name, pair in parts.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{part}={size:,}" for part, size in self.sizes().items())
        return f"<Bundle {self.name}: {sizes}, classes={len(self.classes)}>"


@dataclass(frozen=True)
class Standardize:
    """The usual `prepare` of grey images: scaled to 0..1, then `(value - mean) / std`, with one channel.

    Integers count as 0..255, floats as 0..1. Values outside are refused where the check is cheap: on the CPU, for all
    dtypes but uint8, outside compiled code. Subtraction and product round once each, so all devices give the same bits.

    Args:
        mean: mean of the pixels, on the scale 0..1.
        std: standard deviation of the pixels, on the scale 0..1.
        size: required height and width of images, or None.
    """

    mean: float
    std: float
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise DataError(
                f"mean {self.mean:g} and std {self.std:g} of the pixels",
                expected="finite numbers, and a std above 0",
                fix="Check that the images aren't blank",
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns float32 (B, 1, H, W) of images (B, H, W) or (B, 1, H, W), integer or float. Raises DataError."""
        self._check_shape(x)
        if x.dtype == torch.bool or x.is_complex():
            raise DataError(
                f"images of dtype {str(x.dtype).removeprefix('torch.')}",
                expected="integers from 0 to 255 or floats from 0 to 1",
                fix="Convert the images, for example to uint8",
            )
        top = 1.0 if x.is_floating_point() else 255.0
        if x.dtype != torch.uint8 and x.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_range(x, top)
        images = x.unsqueeze(1) if x.ndim == 3 else x
        return (images.to(torch.float32) - self.mean * top).mul_(1 / (self.std * top))

    def _check_shape(self, x: Tensor) -> None:
        one_channel = x.ndim == 3 or (x.ndim == 4 and x.shape[1] == 1)
        if one_channel and self.size in (None, tuple(x.shape[-2:])):
            return
        wanted = ", ".join(map(str, self.size)) if self.size else "height, width"
        raise DataError(
            f"images of shape {tuple(x.shape)}",
            expected=f"(N, {wanted}) or (N, 1, {wanted})",
            fix="Reshape or resize the images, one grey channel each",
        )


def _check_range(x: Tensor, top: float) -> None:
    if not x.numel():
        return
    low, high = (float(value) for value in torch.aminmax(x))
    # Resizing may overshoot, so floats get a slack of 0.01. Other checks find NaN.
    slack = 0.01 if x.is_floating_point() else 0.0
    if low < -slack or high > top + slack:
        raise DataError(
            f"{str(x.dtype).removeprefix('torch.')} images with values from {low:g} to {high:g}",
            expected=f"{'floats' if slack else 'integers'} from 0 to {top:g}",
            fix="Give the raw pixels: integers from 0 to 255, or floats from 0 to 1, not standardised before",
        )
