"""What the planted scripts share: their arguments, some data, and a line with the time of a step at the end."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

VARIANTS = ("plant", "other", "clean", "decoy")


def arguments(steps: int = 60) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", nargs="?", choices=VARIANTS, default="plant")
    parser.add_argument("--steps", type=int, default=steps)
    torch.manual_seed(0)
    return parser.parse_args()


def pictures(count: int = 512, size: int = 28, channels: int = 1, classes: int = 10) -> tuple[Tensor, Tensor]:
    return torch.rand(count, channels, size, size), torch.arange(count) % classes


def small_cnn(channels: int = 1, size: int = 28, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 4) ** 2, 10),
    )


def mlp(inputs: int = 256, width: int = 512, outputs: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Stopwatch:
    """Told of the end of each step; says at the end what a step takes, by the clock and of the processor."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def lap(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    def say(self) -> None:
        passed, worked = (self._median(at) for at in (0, 1))
        print(f"{passed:.3f} ms a step, {worked:.3f} ms of the processor's")

    def _median(self, at: int) -> float:
        laps = [after[at] - before[at] for before, after in zip(self.marks, self.marks[1:], strict=False)]
        return 1e3 * statistics.median(laps[len(laps) // 4 :])
