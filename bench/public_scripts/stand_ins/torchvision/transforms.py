"""Transforms of PIL images and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class Compose:
    """Transforms in a row."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Bytes become numbers from 0 to 1, channels first."""

    def __call__(self, image: Image.Image) -> Tensor:
        values = torch.from_numpy(np.array(image, np.uint8, copy=True))
        values = values.view(image.size[1], image.size[0], len(image.getbands()))
        return values.permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class Normalize:
    """Subtracts a mean and divides by a deviation, for each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        self.mean, self.std, self.inplace = mean, std, inplace

    def __call__(self, tensor: Tensor) -> Tensor:
        if not self.inplace:
            tensor = tensor.clone()
        mean = torch.as_tensor(self.mean, dtype=tensor.dtype, device=tensor.device)
        std = torch.as_tensor(self.std, dtype=tensor.dtype, device=tensor.device)
        return tensor.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


class Resize:
    """The shorter side, or both, of a PIL image."""

    def __init__(self, size: int | Sequence[int], interpolation: int = Image.Resampling.BILINEAR) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: Image.Image) -> Image.Image:
        if isinstance(self.size, int):
            shorter = min(image.size)
            width, height = (int(self.size * side / shorter) for side in image.size)
        else:
            height, width = self.size
        return image.resize((width, height), self.interpolation)


class CenterCrop:
    """The middle of a PIL image."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        left, top = (round((side - self.size) / 2) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))


class Lambda:
    """A function of the user."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, image: Any) -> Any:
        return self.function(image)
