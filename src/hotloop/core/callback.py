"""The read-only state of a training that callbacks, progress bars and pages receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotloop.core.records.training import EpochRecord

Event = Literal["start", "progress", "epoch", "checkpoint", "stop", "final"]


@dataclass(frozen=True)
class View:
    """The state of a training at an event.

    Attributes:
        epoch: the current epoch, from 0.
        epochs: the number of epochs of the run.
        step: steps since the beginning of the run.
        batch: batches of this epoch that are done.
        batches: batches of an epoch; None for a stream before its first end.
        loss: mean training loss since the last event; None before the first step.
        samples_per_s: speed of the current epoch; 0 before the first step.
        remaining_s: expected seconds to the end of the last epoch; None while unknown.
        learning_rate: of the first parameter group.
        reason: why training stopped (event `stop`).
        final: metrics on the test data (event `final`).
    """

    event: Event
    run: Path
    epoch: int
    epochs: int
    step: int
    batch: int
    batches: int | None
    loss: float | None
    samples_per_s: float
    remaining_s: float | None
    learning_rate: float
    history: tuple[EpochRecord, ...]
    reason: str = ""
    final: dict | None = None


Callback = Callable[[View], None]
"""Receives each event. With the attribute `read_only = True` a callback declares that it changes no part of the
training:
the compiled step then skips the check for changes after each epoch.
"""


def has_user_callbacks(callbacks: Iterable[Any]) -> bool:
    """Returns whether a callback may change the training: neither part of hotloop nor declared `read_only`."""
    return any(
        not str(getattr(callback, "__module__", "")).startswith("hotloop.")
        and getattr(callback, "read_only", False) is not True
        for callback in callbacks
    )
