"""What TensorBoard is given, read back with its own reader."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
import hotloop.training.tensorboard

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard (the dev extra)"
)


class Branching(nn.Module):
    """Can't be traced: what it does depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"x": self.layer(x)}["y" if torch.jit.is_tracing() else "x"]


def _task(model: Callable[[], nn.Module], **fields: Any) -> hotloop.Task:
    return hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        data=(torch.randn(40, 4), torch.arange(40) % 2),
        batch_size=8,
        epochs=3,
        **fields,
    )


def _trained(tmp_path: Path, model: Callable[[], nn.Module]) -> accumulator.EventAccumulator:
    run = hotloop.fit(_task(model, validation=8), run=tmp_path / "run", progress=False)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    return events


def test_scalars_are_those_of_the_run(tmp_path: Path) -> None:
    events = _trained(tmp_path, lambda: nn.Linear(4, 2))
    rows = hotloop.Run.open(tmp_path / "run").epochs
    for tag, key in (("loss/train", "train_loss"), ("loss/validation", "validation_loss")):
        written = events.Scalars(tag)
        assert [point.step for point in written] == [row["step"] for row in rows]
        assert [point.value for point in written] == pytest.approx([row[key] for row in rows])
    assert {"accuracy/validation", "learning_rate", "samples_per_s"} <= set(events.Tags()["scalars"])


def test_the_graph_is_drawn_and_leaves_training_alone(tmp_path: Path) -> None:
    events = _trained(tmp_path, lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    assert events.Tags()["graph"]
    assert any("BatchNorm1d" in node.name for node in events.Graph().node) or "batch_norm" in str(events.Graph())
    counted = hotloop.Run.open(tmp_path / "run").checkpoints.newest()[0].state.buffers["1.num_batches_tracked"]
    assert int(counted) == 3 * 4  # 32 samples in batches of 8, three times: the drawing added none


def test_a_model_that_cannot_be_traced_trains_all_the_same(tmp_path: Path) -> None:
    events = _trained(tmp_path, Branching)
    assert not events.Tags()["graph"]
    assert len(events.Scalars("loss/train")) == 3


@pytest.mark.parametrize("traced", [True, False])
def test_a_copy_of_the_model_that_was_drawn_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: bool
) -> None:
    made: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    def model() -> nn.Module:
        built = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2) if traced else Branching())
        made.append(weakref.ref(built))
        return built

    def copied(given: Any) -> Any:
        found = deepcopy(given)
        made.append(weakref.ref(found))
        return found

    deepcopy = copy.deepcopy
    monkeypatch.setattr(hotloop.training.tensorboard, "copy", SimpleNamespace(deepcopy=copied))

    def look(view: hotloop.View) -> None:
        if view.event == "epoch":
            alive.append(sum(one() is not None for one in made))

    gc.disable()  # or it might happen to look meanwhile
    try:
        hotloop.fit(_task(model), plan="baseline", run=tmp_path / "run", progress=False, callbacks=[look])
    finally:
        gc.enable()
    assert len(made) == 2
    assert alive[-1] == 1
