"""Going on with a run: only as what it was, and from whatever of it is still good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import RunError


def a_task(**changes: Any) -> hotloop.Task:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    fields: dict[str, Any] = dict(
        model=lambda: nn.Linear(4, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        data=(x, torch.arange(60) % 2),
        validation=0.2,
        batch_size=8,
        epochs=2,
    )
    return hotloop.Task(**fields | changes)


def trained(path: Path, **changes: Any) -> hotloop.Run:
    return hotloop.fit(a_task(**changes), run=path, progress=False)


def go_on(path: Path, **changes: Any) -> hotloop.Run:
    return hotloop.fit(a_task(**{"epochs": 4} | changes), run=path, resume=True, progress=False)


@pytest.mark.parametrize("change", [{"seed": 7}, {"shuffle": False}, {"validation": None}], ids=str)
def test_another_order_or_other_samples_held_out_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    trained(tmp_path / "run")
    with pytest.raises(RunError, match="started with"):
        go_on(tmp_path / "run", **change)


def test_the_same_task_goes_on(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    assert len(go_on(tmp_path / "run").epochs) == 4


def test_a_lost_best_epoch_does_not_lose_the_training(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    for file in (run.path / "checkpoints" / "best").iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    again = go_on(tmp_path / "run")
    resumed = [event for event in again.journal() if event["event"] == "resume"]
    assert [event["step"] for event in resumed] == [12]  # two epochs of 48 samples in batches of 8
    assert len(again.epochs) == 4


def test_epochs_beyond_the_end_of_a_schedule_are_refused_and_leave_the_run_as_it_was(tmp_path: Path) -> None:
    def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)

    run = trained(tmp_path / "run", schedule=one_cycle)
    final = run.final
    with pytest.raises(RunError, match="schedule has 0 steps left"):
        go_on(tmp_path / "run", schedule=one_cycle)
    assert hotloop.Run.open(tmp_path / "run").final == final
    assert go_on(tmp_path / "run", schedule=one_cycle, epochs=2).final == final
