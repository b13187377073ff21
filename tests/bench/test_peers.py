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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Adam

from bench.peers import on_torch, transform
from bench.speed import start, tasks
from bench.speed.data import Data
from bench.speed.job import Evaluate, Job
from bench.speed.marks import Marks
from bench.speed.models import build
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
def images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Data:
    data = Data(*drawn(64 * BATCHES, 1), *drawn(200, 2))
    for module in on_torch, transform, tasks:
        monkeypatch.setattr(module, "load", lambda kind: data)
    monkeypatch.setattr(start, "EPOCHS", 3)
    monkeypatch.setattr(start, "orders_file", lambda samples, home: tmp_path / f"{samples}.npy")
    monkeypatch.setattr(start, "weights_file", lambda name, home: tmp_path / f"{name}.npz")
    for name in ("W1", "W3", "W4"):
        start.lay_down_start(WORKLOADS[name], len(data.y))
    return data


@pytest.fixture
def trained(images: Data, tmp_path: Path) -> Callable[[str], tuple[Marks, Evaluate]]:
    def train(peer: str) -> tuple[Marks, Evaluate]:
        if peer in NEEDED:
            pytest.importorskip(NEEDED[peer], reason=f"needs {NEEDED[peer]} (the bench extra)")
        with (tmp_path / "reports").open("w") as reports:
            marks = Marks(reports)
            options = ("baseline",) if peer == "with_hotloop" else ()
            return marks, importlib.import_module(f"bench.peers.{peer}").train(Job(WORKLOADS["W4"], 1, marks, options))

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


Seen = tuple[list[torch.Tensor], list[torch.Tensor]]


def seen_by(peer: str, trained: Callable[[str], tuple[Marks, Evaluate]]) -> tuple[Seen, float]:
    """The first weights and the inputs of each step, in training, and the loss in the end."""
    weights: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []

    def note(module: nn.Module, given: Any) -> None:
        if isinstance(module, nn.Sequential) and module.training and len(given[0]) == 64 and torch.is_grad_enabled():
            if not inputs:
                weights.extend(value.detach().clone() for value in module.parameters())
            inputs.append(given[0].detach().clone())

    hook = register_module_forward_pre_hook(note)
    try:
        _, evaluate = trained(peer)
    finally:
        hook.remove()
    return (weights, inputs), evaluate()[0]


OTHERS = ["with_hotloop", "transform", "compiled", "with_accelerate", "with_lightning", "with_skorch"]


@pytest.mark.parametrize("peer", OTHERS)
def test_all_peers_start_from_the_same_weights_and_see_the_same_batches(
    peer: str, trained: Callable[[str], tuple[Marks, Evaluate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    (weights, inputs), loss = seen_by("tutorial", trained)
    (own_weights, own_inputs), own_loss = seen_by(peer, trained)
    assert len(inputs) == len(own_inputs) == BATCHES and len(weights) == 4
    torch.testing.assert_close(own_weights, weights, rtol=0, atol=0)
    torch.testing.assert_close(own_inputs, inputs)
    assert own_loss == pytest.approx(loss, rel=1e-3)


def test_keras_starts_from_the_same_weights_and_sees_the_same_batches(
    images: Data, trained: Callable[[str], tuple[Marks, Evaluate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch; so its loss is that of torch's own loop."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras", reason="needs keras (the examples extra)")
    from bench.peers import with_keras

    few = Data(images.x[:192], images.y[:192], images.test_x, images.test_y)
    start.lay_down_start(WORKLOADS["W4"], 192)
    for module in on_torch, with_keras:
        monkeypatch.setattr(module, "load", lambda kind: few)
    loss, own_loss = (trained(peer)[1]()[0] for peer in ("tutorial", "with_keras"))
    assert own_loss == pytest.approx(loss, rel=1e-3)
    monkeypatch.setattr(with_keras, "epoch_order", lambda samples, epoch: np.arange(samples))
    assert trained("with_keras")[1]()[0] != pytest.approx(loss, rel=1e-3)  # other batches are seen in the loss


def test_an_epoch_s_order_is_that_of_the_task(images: Data) -> None:
    order = tasks.task("W4").roles.order
    assert order is not None and order.drop_last
    for epoch in range(3):
        assert start.epoch_order(len(images.y), epoch).tolist() == order.epoch(epoch).tolist()
    with pytest.raises(IndexError, match="train fewer"):
        start.epoch_order(len(images.y), 3)


def convolved(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """As JAX and Keras convolve (N, H, W, C): without padding."""
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    return np.einsum("nhwcij,ijco->nhwo", windows, kernel) + bias


def pooled(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))


@pytest.mark.parametrize("name", ["W1", "W3", "W4"])
def test_peers_without_torch_start_from_the_same_network(name: str, images: Data) -> None:
    x = images.prepared().x[:4]
    expected = build(name).eval()(torch.from_numpy(x)).detach().numpy()
    layers = start.channels_last_weights(name)
    found = x.transpose(0, 2, 3, 1).astype(np.float64)
    if name == "W1":
        found = pooled(np.maximum(convolved(np.pad(found, ((0, 0), (1, 1), (1, 1), (0, 0))), *layers.pop(0)), 0))
    if name == "W3":
        found = np.maximum(convolved(found, *layers.pop(0)), 0)
        found = pooled(np.maximum(convolved(found, *layers.pop(0)), 0))
    found = found.reshape(len(x), -1)
    for number, (kernel, bias) in enumerate(layers):
        found = found @ kernel + bias
        found = found if number == len(layers) - 1 else np.maximum(found, 0)
    np.testing.assert_allclose(found, expected, atol=1e-4)
