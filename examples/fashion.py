"""A small convolutional network on Fashion-MNIST.

hotloop train examples/fashion.py --epochs 5 --run runs/first
hotloop train examples/fashion.py -p width=0.5
"""

import torch
from torch import nn

import hotloop


def task(width: float = 1.0) -> hotloop.Task:
    """The classic tutorial network; `width` scales its channels."""
    c1, c2, hidden = (max(1, round(width * n)) for n in (32, 64, 128))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, c1, 3),
            nn.ReLU(),
            nn.Conv2d(c1, c2, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(c2 * 12 * 12, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, 10),
        )

    return hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=hotloop.data.fashion_mnist(otherwise="digits"),
        batch_size=128,
        epochs=12,
        seed=0,
    )
