"""What every peer's script begins and ends with."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from bench.speed.marks import Marks, peak_bytes
from bench.speed.workloads import WORKLOADS, Workload

LR = 1e-3

Evaluate = Callable[[], tuple[float, float]]
"""Loss on the first training samples in evaluation mode, and accuracy on the test samples."""


@dataclass(frozen=True)
class Job:
    """What a peer is to do.

    Attributes:
        workload: what to train.
        epochs: how long, if no bench ends it before.
        marks: gets a call for each step.
        options: the peer's own.
        device: where to train, as torch names it, without a number: `cpu`, `cuda`.
    """

    workload: Workload
    epochs: int
    marks: Marks
    options: tuple[str, ...]
    device: str = "cpu"

    @property
    def few(self) -> slice:
        """Training samples whose loss is taken at the end."""
        return slice(self.workload.judged)

    @property
    def tested(self) -> slice:
        """Test samples whose accuracy is taken at the end: in turns with others a part, after a whole run all."""
        return self.few if self.marks.in_turns or not self.workload.grey else slice(None)


def main(train: Callable[[Job], Evaluate]) -> None:
    """Runs a peer: trains, reports, evaluates, reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("options", nargs="*", help="the peer's own")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where to train; default cpu")
    parser.add_argument("--orders", type=int, help="descriptor to read the bench's orders from")
    parser.add_argument("--reports", type=int, help="descriptor to write to; default stdout")
    given = parser.parse_args()
    marks = Marks(_reports(given.reports), None if given.orders is None else os.fdopen(given.orders))
    job = Job(WORKLOADS[given.workload], given.epochs, marks, tuple(given.options), given.device)
    evaluate = train(job)
    marks.sync()
    marks.report(event="trained", at=time.monotonic(), steps=marks.done, peak_bytes=peak_bytes())
    loss, accuracy = evaluate()
    marks.report(event="evaluated", train_loss=loss, test_accuracy=accuracy)


def _reports(descriptor: int | None) -> TextIO:
    return sys.stdout if descriptor is None else os.fdopen(descriptor, "w")
