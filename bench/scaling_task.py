"""Tasks that several ranks share: one with much arithmetic for each parameter, and one with little."""

from __future__ import annotations

import torch
from torch import nn

import hotloop


def _task(model: type[nn.Module] | object, width: tuple[int, ...], epochs: int) -> hotloop.Task:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(4096, *width, generator=draws), torch.randint(10, (4096,), generator=draws)
    return hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        data=(x, y),
        batch_size=128,
        epochs=epochs,
    )


def cnn(epochs: int = 3) -> hotloop.Task:
    """Two convolutions of 32 and 64 maps on 28x28: 60 thousand parameters."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )

    return _task(model, (1, 28, 28), epochs)


def mlp(epochs: int = 8) -> hotloop.Task:
    """784-1024-1024-10: 1.9 million parameters."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    return _task(model, (784,), epochs)
