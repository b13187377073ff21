"""The networks of the checks as Tasks, on data made from a seed: no check needs a file that isn't in the repository.

    hotloop train bench.gpu.tasks:task -p name=W4 --device cuda

`full` networks are those of `bench.speed`, with data of the same shapes. `small` ones are of the same kinds, and their
steps take milliseconds on one core.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

import hotloop
from bench.speed import models
from bench.speed.data import ALPHABET
from bench.speed.job import LR
from bench.speed.workloads import WORKLOADS

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network and its data.

    Attributes:
        shape: of one sample: images float32 (C, H, W), features float32 (F,), or tokens int64 (T,).
        samples: how many there are to train on.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    batch: int
    of_text: bool = False


def _full(name: str) -> Network:
    data, batch = WORKLOADS[name].data, WORKLOADS[name].batch
    build = models.MODELS[name]
    if data.startswith("text"):
        length = int(data.removeprefix("text-"))
        return Network(build, (length,), 1700 if length == 256 else 6800, batch, of_text=True)
    if data == "fashion":
        return Network(build, (1, 28, 28), 60_000, batch)
    side = int(data.removeprefix("images-"))
    return Network(build, (3, side, side), 2048 if side == 32 else 256, batch)


def small_resnet(width: int) -> nn.Module:
    """Two of ResNet-18's blocks, one of them with a stride."""
    first = (nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks = (models.Block(width, width, 1), models.Block(width, 2 * width, 2))
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES))


_SMALL: dict[str, Network] = {
    "W1": Network(models.small_cnn, (1, 28, 28), 512, 8),
    "W2": Network(models.small_cnn, (1, 28, 28), 512, 32),
    "W3": Network(models.tutorial_cnn, (1, 28, 28), 64, 4),
    "W4": Network(lambda: models.mlp(784, 32, CLASSES), (1, 28, 28), 1024, 16),
    "W5": Network(lambda: models.mlp(784, 64, 64, CLASSES), (1, 28, 28), 512, 16),
    "W6": Network(lambda: small_resnet(8), (3, 8, 8), 64, 8),
    "W7": Network(lambda: models.Gpt(32, 1, 2, 16), (16,), 64, 4, of_text=True),
    "W8": Network(lambda: models.Lstm(16), (8,), 64, 4, of_text=True),
    "W9": Network(lambda: models.vgg16(4, 16, 32), (3, 32, 32), 16, 2),
}


def width_of(parameters: int) -> int:
    """Of the perceptron `width-width-width-10` that has about so many parameters: 2 w**2 + 12 w + 10."""
    return max(1, round(-3 + math.sqrt(9 + (parameters - 10) / 2)))


def perceptron(parameters: int, batch: int) -> Network:
    width = width_of(parameters)
    return Network(lambda: models.mlp(width, width, width, CLASSES), (width,), max(256, 2 * batch), batch)


def network(name: str, size: str = "full", batch: int | None = None) -> Network:
    """Such as `W1`, or `mlp-1e6` with its batch."""
    if name.startswith("mlp-"):
        return perceptron(int(float(name.removeprefix("mlp-"))), batch or 64)
    return _full(name) if size == "full" else _SMALL[name]


@lru_cache(maxsize=2)
def drawn(shape: tuple[int, ...], samples: int, of_text: bool) -> tuple[Tensor, Tensor]:
    """Samples and labels, drawn from a seed: images are noise around a pattern of their class."""
    draws = torch.Generator().manual_seed(0)
    if of_text:
        tokens = torch.randint(len(ALPHABET), (samples, shape[0] + 1), generator=draws)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    labels = torch.randint(CLASSES, (samples,), generator=draws)
    patterns = torch.randn(CLASSES, *shape, generator=draws)
    return torch.randn(samples, *shape, generator=draws).add_(patterns[labels], alpha=0.5), labels


class Stop:
    """A callback that notes when the first step was done, and ends training some seconds later, as SIGTERM does.

    Args:
        marks: file for the time of the first step, in seconds since 1970.
        seconds: of training after that.
    """

    read_only = True

    def __init__(self, marks: Path, seconds: float) -> None:
        self.marks, self.seconds = marks, seconds
        self._first: float | None = None

    def __call__(self, view: hotloop.View) -> None:
        if self._first is None and view.step:
            self._first = time.time()
            self.marks.write_text(json.dumps({"first_at": self._first, "step": view.step}))
        if self._first is not None and view.event == "progress" and time.time() > self._first + self.seconds:
            signal.raise_signal(signal.SIGTERM)


def task(
    name: str, size: str = "full", epochs: int = 1, batch: int = 0, marks: str = "", seconds: float = 0.0
) -> hotloop.Task:
    """One of the networks.

    Args:
        batch: samples in a step, for a perceptron.
        marks, seconds: see `Stop`; without them training runs to its end.
    """
    made = network(name, size, batch or None)
    return hotloop.Task(
        model=made.build,
        loss=models.TextLoss() if made.of_text else nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=LR),
        data=drawn(made.shape, made.samples, made.of_text),
        batch_size=made.batch,
        epochs=epochs,
        callbacks=[Stop(Path(marks), seconds)] if marks else [],
        name=f"{name}-{size}",
    )
