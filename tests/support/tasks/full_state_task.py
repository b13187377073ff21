"""A Task with all that training carries from one step to the next: what a resumed run could get wrong.

    hotloop train tests/support/tasks/full_state_task.py --run runs/everything
    hotloop train tests/support/tasks/full_state_task.py -p marks=FOLDER       also notes there, byte by byte, the steps begun

It is small: 13 steps an epoch, the last one of an incomplete batch, each of about a millisecond.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import hotloop

STEPS_PER_EPOCH = 13
_SAMPLES, _HELD_OUT, _BATCH, _FEATURES, _CLASSES = 243, 40, 16, 12, 4


class Noisy(torch.utils.data.Dataset):
    """Samples that differ each time they are asked for, by the draws of three libraries."""

    def __init__(self, samples: int, seed: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, _FEATURES, generator=generator)
        self.y = self.x[:, :_CLASSES].argmax(1)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.randn(_FEATURES) + random.gauss(0, 1) + float(np.random.standard_normal())
        return self.x[index] + self.noise * draw, int(self.y[index])


class Network(nn.Module):
    """Batch normalisation, dropout, noise of Python's and NumPy's generators, a buffer that grows, a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(16, _CLASSES)
        self.register_buffer("seen", torch.zeros(0), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            self.calls += 1
            hidden = hidden * (1 + 0.1 * random.random() + 0.1 * float(np.random.random()) + 0.001 * self.calls)
            self.seen = torch.cat([self.seen[-9:], hidden.detach().mean()[None]])
        return self.head(hidden)


class CentredLoss(nn.Module):
    """A cross entropy around a running mean of the outputs, which is a buffer that training changes."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(_CLASSES))
        self.marks = marks

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        training = torch.is_grad_enabled()
        if self.marks and (training or not self.training):  # not where a copy of the loss is tried
            _mark(Path(self.marks), "steps" if training else "evaluation")
            _wait(Path(self.marks))
        if training:
            self.centre.lerp_(output.detach().mean(0).float(), 0.1)
        return nn.functional.cross_entropy(output - self.centre, target)


def _mark(folder: Path, name: str) -> None:
    """Adds a byte to a file, at once and in one piece: what a killed process did stays known."""
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, b".")
    os.close(descriptor)


def _wait(folder: Path) -> None:
    """Waits where a file `held` has fewer bytes than steps were begun."""
    with suppress(FileNotFoundError):
        while (folder / "held").stat().st_size < (folder / "steps").stat().st_size:
            time.sleep(0.001)


def jitter(x: Tensor, draws: hotloop.data.Draws) -> Tensor:
    """Augments by the sample's own numbers, and by the global generator, as users also do."""
    return x + 0.05 * draws.normal(_FEATURES) + 0.05 * torch.randn_like(x)


def task(epochs: int = 20, marks: str = "") -> hotloop.Task:
    """The Task; `marks` is a folder to note steps and evaluations in."""
    return hotloop.Task(
        name="everything",
        model=Network,
        loss=CentredLoss(marks),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=2 * total),
        data=Noisy(_SAMPLES, seed=1, noise=0.1),
        validation=_HELD_OUT,
        test=Noisy(50, seed=2, noise=0.0),
        augment=jitter,
        batch_size=_BATCH,
        epochs=epochs,
        clip_norm=1.0,
        average=0.9,
        seed=3,
    )
