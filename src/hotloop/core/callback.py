"""What callbacks, progress bars and pictures see of a training under way: a value, read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotloop.core.records.training import EpochRecord

Event = Literal["start", "progress", "epoch", "checkpoint", "stop", "final"]


@dataclass(frozen=True)
class View:
    """One moment of a training.

    Attributes:
        event: what just happened.
        run: the run's folder.
        epoch: the present epoch, from 0; `epochs` in all.
        step: steps done since the beginning; `batch` of `batches` in this epoch (None: a stream, not known yet).
        loss: mean training loss since the last moment; None before the first step.
        samples_per_s: of the present epoch so far; 0 before the first step.
        remaining_s: expected time to the end of the last epoch; None while unknown.
        learning_rate: of the first parameter group.
        history: the epochs done.
        reason: why training stopped, at `stop`.
        final: figures on the test data, at `final`.
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
"""Called with each moment. One that changes nothing of what is trained may say so by an attribute, `read_only = True`:
then a compiled step isn't traced again at each epoch to see whether it did."""


def has_user_callbacks(callbacks: Iterable[Any]) -> bool:
    """Whether one of them may change what is trained: it is not hotloop's own, such as a progress bar, nor does it say
    `read_only = True` of itself."""
    return any(not (_is_hotloop_callback(one) or getattr(one, "read_only", False) is True) for one in callbacks)


def _is_hotloop_callback(callback: Any) -> bool:
    return str(getattr(callback, "__module__", "")).startswith("hotloop.")
