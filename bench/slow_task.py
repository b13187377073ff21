"""A Task whose step is a sleep, of which one of the processes that share the training takes five times as long."""

from __future__ import annotations

import multiprocessing
import os
import time

import torch
from torch import nn

import hotloop

STEP_S = 0.2


def is_first() -> bool:
    """Whether this is the first rank, or the first worker."""
    return "0" in (os.environ.get("RANK"), multiprocessing.current_process().name.removeprefix("hotloop worker "))


def task(step_s: float = STEP_S, slowness: float = 1.0, batches: int = 160) -> hotloop.Task:
    """Each step sleeps `step_s` seconds, on the first rank or worker `slowness` times as long."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batches * 8, 16, generator=generator)
    loss = nn.MSELoss()

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if model.training:
            time.sleep(step_s * (slowness if is_first() else 1.0))
        result: torch.Tensor = loss(model(batch), batch)
        return result

    return hotloop.Task(
        model=lambda: nn.Linear(16, 16),
        step=step,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=x,
        batch_size=8,
        epochs=2,
        seed=0,
    )
