"""A Task that any plan of a CPU can run, compiled and in pieces: what runs under other plans could get wrong.

    hotloop train tests/support/tasks/capturable_task.py --run runs/capturable --set compile=package
    hotloop train tests/support/tasks/capturable_task.py -p marks=FOLDER       also notes there, byte by byte, the steps begun

It is small, and quickly compiled: 13 steps an epoch, the last one of an incomplete batch, each of about a millisecond.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import hotloop

_SAMPLES, _HELD_OUT, _BATCH, _SIDE, _CLASSES = 243, 40, 16, 6, 4


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, 16), nn.ReLU(), nn.Linear(16, _CLASSES))


def _wait(folder: Path) -> None:
    """Waits where a file `held` has fewer bytes than steps were begun."""
    with suppress(FileNotFoundError):
        while (folder / "held").stat().st_size < (folder / "steps").stat().st_size:
            time.sleep(0.001)


def jitter(x: Tensor, draws: hotloop.data.Draws, marks: str) -> Tensor:
    """Noise of the sample's own; as the last thing before each step, it notes that this one begins."""
    if marks:
        with (Path(marks) / "steps").open("ab", buffering=0) as file:
            file.write(b".")
        _wait(Path(marks))
    return x + 0.05 * draws.normal(1, _SIDE, _SIDE)


def task(epochs: int = 20, marks: str = "") -> hotloop.Task:
    """The Task; `marks` is a folder to note steps in."""
    images = torch.randn(_SAMPLES, 1, _SIDE, _SIDE, generator=torch.Generator().manual_seed(1))
    return hotloop.Task(
        name="capturable",
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total),
        data=(images, images.flatten(1)[:, :_CLASSES].argmax(1)),
        validation=_HELD_OUT,
        augment=partial(jitter, marks=marks),
        batch_size=_BATCH,
        epochs=epochs,
        clip_norm=1.0,
        average=0.9,
        seed=3,
    )
