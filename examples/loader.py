"""A data set and a DataLoader as most PyTorch programs have them, used as they are.

Run it:

    hotloop train examples/loader.py
    hotloop train examples/loader.py --workers 2        the same numbers, loaded by two processes
"""

import random

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hotloop


class Shapes(Dataset):
    """Pictures of crosses and squares, drawn anew at each look: somewhere, in some size, with noise.

    Random numbers may come from Python, NumPy or torch. Each generator is seeded for the sample that is asked for, so
    the number of workers changes nothing.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 2
        half = random.randint(2, 4)
        row, column = random.randint(half, 15 - half), random.randint(half, 15 - half)
        picture = 0.3 * torch.randn(1, 16, 16)
        box = picture[0, row - half : row + half + 1, column - half : column + half + 1]
        if label:
            box[half, :] += 1
            box[:, half] += 1
        else:
            box[[0, -1], :] += 1
            box[:, [0, -1]] += 1
        return picture, label


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 2),
    )


task = hotloop.Task(
    model=network,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    # Batch size, collate function and workers are the loader's. Its shuffling becomes an order that follows from the
    # Task's seed. A sampler of your own stays as it is; then the run can be resumed, but other workers may differ.
    data=DataLoader(Shapes(800), batch_size=32, shuffle=True),
    validation=Shapes(200),
    epochs=5,
    classes=["square", "cross"],
)
