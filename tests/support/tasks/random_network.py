"""A network and a data set that draw random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.programs import labelled


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class Drawing(Dataset):
    """Samples with noise from all three generators."""

    def __init__(self, count: int = 24) -> None:
        self.x, self.y = labelled(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(6)
        return self.x[index] + noise, self.y[index]
