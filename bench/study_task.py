"""The Task of `bench.study`, whose network and data the plain loop in `bench/study_loop.py` shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hotloop

BATCH_SIZES = {"mlp": 64, "cnn": 8}
"""As W4 and W1 of `bench.speed`."""

VALIDATION = 5000


def network(name: str, width: int, dropout: float) -> nn.Module:
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))
    return nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1960, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 10),
    )


def arrays(samples: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns so many training samples of Fashion-MNIST, and the validation samples; images (N, 1, 28, 28)."""
    bundle = hotloop.data.fashion_mnist(validation=VALIDATION)
    images, labels = bundle.train
    held_out, held_out_labels = bundle.validation
    scaled = [(part.float().div(255) - 0.286) / 0.353 for part in (images[:samples], held_out)]
    first, second = (part.unsqueeze(1) for part in scaled)
    return (first, labels[:samples]), (second, held_out_labels)


def task(
    lr: float = 0.1, width: int = 128, dropout: float = 0.0, net: str = "mlp", samples: int = 55_000, epochs: int = 2
) -> hotloop.Task:
    train, validation = arrays(samples)
    return hotloop.Task(
        model=lambda: network(net, width, dropout),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        data=train,
        validation=validation,
        batch_size=BATCH_SIZES[net],
        epochs=epochs,
    )
