"""The best epoch, and whether to stop: a function of the history alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hotloop.core.records.training import EpochRecord
from hotloop.errors import TaskError

FINISHED = "finished"

PAUSED = "paused"
"""The reason of a stop at the end of a chosen epoch; the run can be resumed."""


@dataclass(frozen=True)
class RunOutcome:
    """The end of a training.

    Attributes:
        reason: `finished`, `paused`, `SIGINT`, `SIGTERM`, `SIGHUP`, `stop-after`, or the reason of an early stop.
        final: metrics of the test data; None after an interruption.
    """

    reason: str
    is_finished: bool
    history: list[EpochRecord]
    final: dict[str, Any] | None


_MINIMIZED = ("loss", "error", "perplexity", "mse", "mae", "rmse")


@dataclass(frozen=True)
class EarlyStopping:
    """Rules for one metric.

    Attributes:
        figure: the metric, such as `validation_loss`.
        stop_below: stop when the metric is better than this value.
        patience: stop after this number of epochs without a new best.
        pause_after_epoch: stop at the end of this epoch, from 1; the run can be resumed.
    """

    figure: str
    is_minimized: bool
    stop_below: float | None = None
    patience: int | None = None
    pause_after_epoch: float = math.inf

    @classmethod
    def of(
        cls, monitor: str | None, goal: str | None, has_validation: bool, **rules: float | int | None
    ) -> EarlyStopping:
        figure = monitor or ("validation_loss" if has_validation else "train_loss")
        if figure.startswith("validation_") and not has_validation:
            raise TaskError(
                f"monitor={figure!r}, and the Task has no validation data",
                expected="such data, or a figure of training",
                fix="give the Task validation=0.1, or monitor train_loss",
            )
        falls = goal == "min" if goal else any(word in figure for word in _MINIMIZED)
        return cls(figure, falls, **rules)  # type: ignore[arg-type]

    def monitor(self) -> dict[str, str]:
        """Returns the metric and its goal as fields of the journal."""
        return {"monitor": self.figure, "goal": "min" if self.is_minimized else "max"}

    def value(self, record: EpochRecord) -> float:
        """Returns the metric of an epoch.

        Raises:
            TaskError: epochs have no such metric.
        """
        value = record.figure(self.figure)
        if value is None:
            known = [name for name in record.flat() if name.startswith(("train_", "validation_"))]
            known = [name for name in known if record.figure(name) is not None]
            raise TaskError(
                f"monitor={self.figure!r} is no figure of this Task",
                expected="one of " + ", ".join(known),
                fix="check the spelling, or add it to the Task's metrics",
            )
        return value

    def is_better(self, one: float, other: float) -> bool:
        return one < other if self.is_minimized else one > other

    def best(self, history: list[EpochRecord]) -> EpochRecord | None:
        """Returns the first of the best epochs."""
        best = None
        for record in history:
            if best is None or self.is_better(self.value(record), self.value(best)):
                best = record
        return best

    def verdict(self, history: list[EpochRecord]) -> str | None:
        """Returns why to stop; None to continue."""
        best = self.best(history)
        if best is None:
            return None
        if self.stop_below is not None and self.is_better(self.value(history[-1]), self.stop_below):
            return f"{self.figure} reached {self.value(history[-1]):.4g}"
        if self.patience is not None and history[-1].epoch - best.epoch >= self.patience:
            return f"no better {self.figure} for {self.patience} epochs"
        return PAUSED if history[-1].epoch >= self.pause_after_epoch else None
