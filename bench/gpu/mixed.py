"""A Task whose model keeps a tensor on another device than the one it trains on: a user's mistake.

hotloop train bench/gpu/mixed.py -p other=cpu --device cuda
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hotloop


class Mixed(nn.Module):
    def __init__(self, other: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.shift = [torch.zeros(3, device=other)]  # in a list, so that it isn't moved with the model

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift[0]


def task(other: str = "cpu") -> hotloop.Task:
    return hotloop.Task(
        model=lambda: Mixed(other),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(torch.randn(20, 4), torch.arange(20) % 3),
        batch_size=5,
        name="mixed",
    )
