"""Tasks to race, and a clock that stands still but for what is planted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hotloop.lowering.eager_step import EagerStep
from hotloop.plan import Plan

CPU = Plan(device="cpu")


class Clock:
    """Stands still but for what is planted; so a race of real Programs comes out the same each time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def standing_still(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Each step takes 10 ms, by this clock alone; one of the marked plan a tenth more."""
    clock, as_it_is = Clock(), EagerStep.__call__

    def step(self: EagerStep, batch: Any, samples: int, number: int) -> Any:
        clock.now += 0.011 if self.parts.plan.workers == 0 else 0.01
        return as_it_is(self, batch, samples, number)

    monkeypatch.setattr(EagerStep, "__call__", step)
    return clock


TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": dict(optimizer=torch.optim.Adam, average=0.9),
    "a schedule with an end": dict(
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
    ),
    "a plateau": dict(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau, schedule_every="epoch"),
    "buffers and draws": dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    ),
    "two epochs": dict(epochs=2),
}
