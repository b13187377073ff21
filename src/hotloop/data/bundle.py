"""What a built-in data set hands over: its parts, its classes, and how a raw batch becomes model input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.errors import DataError

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Bundle:
    """A data set in memory, raw, on the CPU.

    Args:
        name: what it is called, such as "Fashion-MNIST".
        train: `(x, y)`: raw inputs of shape (N, ...) and labels of shape (N,).
        validation: the same for the samples held back to choose by, or None.
        test: the same for the final figure, or None.
        classes: the name of each label, in order.
        prepare: turns a batch of raw inputs into float32 model input, sample by sample, on its device.
        note: what the user should know of this data, such as "these are the digits, because ..."; mostly "".
    """

    name: str
    train: Pair
    validation: Pair | None
    test: Pair | None
    classes: tuple[str, ...] = ()
    prepare: Callable[[Tensor], Tensor] | None = None
    note: str = ""

    def __repr__(self) -> str:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = ", ".join(f"{part}={len(pair[1]) if pair else 0:,}" for part, pair in parts.items())
        return f"<Bundle {self.name}: {sizes}, classes={len(self.classes)}>"


@dataclass(frozen=True)
class Standardize:
    """The usual `prepare` of grey images: scaled to 0..1, then `(value - mean) / std`, with one channel.

    Integers are taken as 0..255 and divided by 255, floats as 0..1. A value outside its range would give a
    wrong answer without a word, so it is refused where looking costs nothing to speak of: on the CPU, for any
    dtype but uint8, outside compiled code. Subtraction and product are two operations of one rounding each,
    so that all devices give the same bits.

    Args:
        mean: mean of the pixels, on the scale 0..1.
        std: standard deviation of the pixels, on the scale 0..1.
        size: height and width that images must have, or None for any.
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
        """Images (B, H, W) or (B, 1, H, W), integer or float -> float32 (B, 1, H, W). Raises DataError."""
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
    # Resizing may overshoot a little, so floats get a hundredth of slack; NaN is for others to find.
    slack = 0.01 if x.is_floating_point() else 0.0
    if low < -slack or high > top + slack:
        raise DataError(
            f"{str(x.dtype).removeprefix('torch.')} images with values from {low:g} to {high:g}",
            expected=f"{'floats' if slack else 'integers'} from 0 to {top:g}",
            fix="Give the raw pixels: integers from 0 to 255, or floats from 0 to 1, not standardised before",
        )
