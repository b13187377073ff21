"""A small network of known layers: trained by torch, or by `hotloop.arrays` alone.

hotloop train examples/written_out.py
python examples/written_out.py
"""

import torch
from torch import nn

import hotloop
from hotloop.arrays import Conv, Dense, MaxPool, Network, ReLU


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


task = hotloop.Task(
    model=model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    data=hotloop.data.digits(),
    batch_size=8,
    epochs=5,
    seed=0,
)


def by_itself() -> None:
    """The same layers without torch: all that it gets are NumPy's arrays."""
    data = hotloop.data.digits()
    (x, y), (x_test, y_test) = ((data.prepare(x).numpy(), y.numpy()) for x, y in (data.train, data.test))
    net = Network([Conv(10, 3, pad=1), ReLU(), MaxPool(2), Dense(100), ReLU(), Dense(10)], optimizer="adam")
    net.fit(x, y, x_test, y_test, epochs=5, batch_size=8)
    print(*net.time_layers(x[:8], y[:8]), sep="\n")


if __name__ == "__main__":
    by_itself()
