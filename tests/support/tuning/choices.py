"""Requests, data and networks that tests of choosing share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.plan import Plan
from tests.support.programs import a_task, labelled

CPU = Plan(device="cpu")
AUTO = PlanRequest(CPU, is_auto=True)


class Samples(torch.utils.data.Dataset):
    """Returns the samples of `labelled` one by one; `asked` gets the index of each sample."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        x, y = labelled()
        return x[index], y[index]


def images(normed: bool = False, epochs: int = 1000) -> hotloop.Task:
    layers = [nn.Conv2d(1, 2, 3), *([nn.BatchNorm2d(2)] if normed else []), nn.Flatten(), nn.Linear(32, 3)]
    data = (torch.randn(12, 1, 6, 6), torch.arange(12) % 3)
    return a_task(model=nn.Sequential(*layers), data=data, epochs=epochs)
