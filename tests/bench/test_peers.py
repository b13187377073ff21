"""The bench's peers train what they say: images told apart after an epoch, one step of an optimizer for each batch counted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam

from bench.peers import on_torch, transform
from bench.speed.data import Data
from bench.speed.job import Evaluate, Job
from bench.speed.marks import Marks
from bench.speed.workloads import WORKLOADS

NEEDED = {"with_accelerate": "accelerate", "with_lightning": "lightning", "with_skorch": "skorch"}
BATCHES = 24


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten coarse patterns under noise, one for each class."""
    patterns = np.random.default_rng(0).integers(0, 200, (10, 7, 7)).repeat(4, 1).repeat(4, 2)
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, 10, count)
    return (patterns[labels] + draws.integers(0, 56, (count, 28, 28))).astype(np.uint8), labels


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Data:
    data = Data(*drawn(64 * BATCHES, 1), *drawn(200, 2))
    for module in on_torch, transform:
        monkeypatch.setattr(module, "load", lambda kind: data)
    return data


@pytest.fixture
def trained(images: Data, tmp_path: Path) -> Callable[[str], tuple[Marks, Evaluate]]:
    def train(peer: str) -> tuple[Marks, Evaluate]:
        if peer in NEEDED:
            pytest.importorskip(NEEDED[peer], reason=f"needs {NEEDED[peer]} (the bench extra)")
        with (tmp_path / "reports").open("w") as reports:
            marks = Marks(reports)
            return marks, importlib.import_module(f"bench.peers.{peer}").train(Job(WORKLOADS["W4"], 1, marks, ()))

    return train


@pytest.mark.parametrize("peer", ["tutorial", "transform", "with_accelerate", "with_lightning", "with_skorch"])
def test_a_peer_trains_an_epoch_and_counts_each_update(
    peer: str, trained: Callable[[str], tuple[Marks, Evaluate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[Adam] = []
    step = Adam.step

    def counted(self: Adam, closure: Any = None) -> Any:
        updates.append(self)
        return step(self, closure)

    monkeypatch.setattr(Adam, "step", counted)
    marks, evaluate = trained(peer)
    loss, accuracy = evaluate()
    assert marks.done == len(updates) == BATCHES
    assert loss < 1 and accuracy > 0.9


def test_a_peer_that_updates_nothing_is_told_by_what_it_reached(
    trained: Callable[[str], tuple[Marks, Evaluate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adam, "step", lambda self, closure=None: None)
    _, evaluate = trained("tutorial")
    assert evaluate()[1] < 0.5


@pytest.mark.usefixtures("images")
def test_after_few_steps_weights_are_judged_and_not_how_far_averages_lag(tmp_path: Path) -> None:
    """The network tells the patterns apart as soon as its norm knows their mean; before, it takes all for one class."""
    with (tmp_path / "reports").open("w") as reports, (tmp_path / "orders").open("w+") as orders:
        marks = {"whole": Marks(reports), "in turns": Marks(reports, orders)}
        accuracy = {}
        for name, one in marks.items():
            data = on_torch.load("").prepared()
            x, y = torch.from_numpy(data.x).flatten(1), torch.from_numpy(data.y)
            means = torch.stack([x[y == label].mean(0) for label in range(10)]) - x.mean(0)
            model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784, affine=False), nn.Linear(784, 10, bias=False))
            model[2].weight = nn.Parameter(means)
            model[1].running_mean += 100 * means[3]
            _, accuracy[name] = on_torch.judged(model, Job(WORKLOADS["W4"], 1, one, ()))
    assert accuracy["in turns"] > 0.9 and accuracy["whole"] < 0.3


def test_who_transforms_each_sample_trains_on_the_same_numbers(images: Data) -> None:
    samples, prepared = transform.Images(images), images.prepared()
    for index in (0, 7, len(samples) - 1):
        image, label = samples[index]
        torch.testing.assert_close(image, torch.from_numpy(prepared.x[index]))
        assert label == prepared.y[index]
