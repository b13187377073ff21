"""The step of a Task measured on this machine."""

from __future__ import annotations

import time

import torch
from torch import nn

from hotloop import Task
from hotloop.advisor.this_machine import measure_step
from hotloop.plan import Plan

PAUSE_MS = 40.0


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class UnevenModel(nn.Module):
    """A layer that pauses in each third step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 2), 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps % 3 == 0:
            time.sleep(PAUSE_MS / 1e3)
        return self.layer(rows)


def test_the_interval_of_a_measured_step_has_the_slow_steps() -> None:
    data = torch.randn(96, 4), torch.randint(0, 2, (96,))
    task = Task(model=UnevenModel, optimizer=sgd, data=data, loss=nn.CrossEntropyLoss(), batch_size=8, epochs=2)
    step, _, _ = measure_step(task, Plan())
    assert step.low_ms < step.step_ms < step.high_ms
    assert step.high_ms >= PAUSE_MS
