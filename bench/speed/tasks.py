"""The workloads as Tasks: what a user of hotloop writes."""

from __future__ import annotations

import torch

import hotloop
from bench.speed.data import load
from bench.speed.job import LR
from bench.speed.models import build, loss_module
from bench.speed.workloads import WORKLOADS


def task(name: str, epochs: int = 1, samples: int | None = None) -> hotloop.Task:
    """Returns the Task of a workload, with its first `samples` training samples; None for all."""
    workload = WORKLOADS[name]
    data = load(workload.data).prepared()
    return hotloop.Task(
        model=lambda: build(name),
        loss=loss_module(name)(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=LR),
        data=(data.x[:samples], data.y[:samples]),
        batch_size=workload.batch,
        drop_last=True,
        epochs=epochs,
        name=name,
    )
