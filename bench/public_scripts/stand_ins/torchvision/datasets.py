"""Fashion-MNIST under the names of torchvision's data sets."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

DEFAULT_FOLDER = "/usr/share/datasets/fashion-mnist"


class MNIST(Dataset):
    """60,000 or 10,000 grey pictures of 28 x 28 bytes with labels from 0 to 9."""

    def __init__(
        self,
        root: str | Path | None = None,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
    ) -> None:
        self.transform, self.target_transform = transform, target_transform
        part = "train" if train else "t10k"
        self.data = _read(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 28, 28)
        self.targets = _read(f"{part}-labels-idx1-ubyte.gz", 8).long()
        if count := int(os.environ.get("FASHION_MNIST_COUNT", "0")):
            self.data, self.targets = self.data[:count].clone(), self.targets[:count].clone()

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = self.data[index], int(self.targets[index])
        image = Image.fromarray(image.numpy())
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __len__(self) -> int:
        return len(self.data)


class FashionMNIST(MNIST):
    """The same pictures."""


class FakeData(Dataset):
    """Random pictures, the same at each read."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 10,
        transform: Any = None,
    ) -> None:
        self.size, self.image_size, self.num_classes, self.transform = size, image_size, num_classes, transform

    def __getitem__(self, index: int) -> tuple[Any, int]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, self.image_size, generator=generator, dtype=torch.uint8)
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        return (picture if self.transform is None else self.transform(picture)), index % self.num_classes

    def __len__(self) -> int:
        return self.size


def _read(name: str, offset: int) -> Tensor:
    folder = Path(os.environ.get("FASHION_MNIST", DEFAULT_FOLDER))
    with gzip.open(folder / name) as file:
        return torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=offset).copy())
