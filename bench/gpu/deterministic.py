"""The Tasks of the resume checks, with torch's deterministic algorithms on.

CUBLAS_WORKSPACE_CONFIG=:4096:8 hotloop train bench/gpu/deterministic.py:everything --device cuda
"""

from __future__ import annotations

import torch

import hotloop
from tests.support.tasks import capturable_task as of_graphs
from tests.support.tasks import full_state_task as of_all

torch.use_deterministic_algorithms(True)

NEEDED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables without which cuBLAS refuses to be deterministic."""


def everything(epochs: int = 20, marks: str = "") -> hotloop.Task:
    """All that training carries from step to step; runs eagerly."""
    return of_all.task(epochs, marks)


def capturable(epochs: int = 20, marks: str = "") -> hotloop.Task:
    """What a CUDA graph can record."""
    return of_graphs.task(epochs, marks)
