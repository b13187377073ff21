"""Networks of different kinds on Fashion-MNIST, whose best plans differ; `epochs` makes a run of them long enough."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hotloop


def _task(model: type[nn.Module] | object, batch_size: int, epochs: int) -> hotloop.Task:
    return hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=hotloop.data.fashion_mnist(),
        batch_size=batch_size,
        epochs=epochs,
    )


def cnn(epochs: int = 1) -> hotloop.Task:
    """Convolution of 10 maps, pooling, 100 hidden units, batch 8: bound by what PyTorch spends on each operation."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 10, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1960, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        )

    return _task(model, 8, epochs)


def mlp(epochs: int = 1) -> hotloop.Task:
    """784-512-512-10, batch 128: bound by the update of its many numbers."""

    def model() -> nn.Module:
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(nn.Flatten(), *layers)

    return _task(model, 128, epochs)


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 64, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.lstm(images.flatten(0, 1))[0][:, -1])


def rows(epochs: int = 1) -> hotloop.Task:
    """An LSTM over the rows of the images, batch 64: bound by arithmetic in many small pieces."""
    return _task(Rows, 64, epochs)
