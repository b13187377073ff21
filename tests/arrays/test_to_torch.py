"""A `Network` as a torch model with its weights, which torch goes on training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop import arrays as a
from hotloop.errors import TaskError
from tests.support.array_layer_checks import NAMESPACES, TOLERANCE, host
from tests.support.programs import a_task, advance

NETWORKS: dict[str, tuple[Callable[[], list[a.Layer]], tuple[int, ...]]] = {
    "images": (
        lambda: [
            a.Conv(4, 3, pad=1, groups=2), a.BatchNorm(), a.LeakyReLU(0.2), a.MaxPool(2, 1), a.SiLU(),
            a.Residual([a.Conv(4, (3, 1), pad=(1, 0), bias=False), a.BatchNorm(affine=False), a.ELU(0.7)]),
            a.AveragePool(2, pad=1), a.Conv(3, 2, 2, dilation=(1, 2)), a.GELU(), a.Dropout(0.3), a.Dense(6), a.BatchNorm(),
        ],
        (2, 7, 8),
    ),
    "means": (lambda: [a.Conv(4, 2), a.Sigmoid(), a.AveragePool(), a.Flatten(), a.Softplus()], (1, 4, 5)),
    "sequences": (
        lambda: [a.RNN(5), a.LayerNorm(), a.Chain([a.LSTM(4), a.At(1), a.Dense(6)]), a.Reshape((2, 3)), a.Tanh(),
                 a.LayerNorm(2, bias=False), a.LSTM(4, last=True)],
        (3, 2),
    ),
    "vectors": (
        lambda: [a.Dense(5, bias=False, each=True), a.Softmax(2), a.Mean((1,)), a.Identity(), a.ReLU()], (3, 4),
    ),
    "a graph": (
        lambda: [a.Graph({
            "one": (a.Dense(4), "x"), "two": (a.Tanh(), "one"), "three": (a.Dense(4), "one", "two"),
            "sum": (a.Identity(), "three", "two", "one"),
        })],
        (2, 3),
    ),
}  # fmt: skip


def trained(name: str, space: str = "numpy") -> tuple[a.Network, np.ndarray]:
    make, sample = NETWORKS[name]
    random = np.random.default_rng(3)
    x, y = random.standard_normal((8, *sample)), random.integers(0, 3, 8)
    net = a.Network([*make(), a.Dense(3)], xp=space)
    net.fit(x, y, epochs=2, batch_size=4, progress=False)
    return net, x


@pytest.mark.parametrize("space", NAMESPACES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_model_says_what_the_network_says(name: str, space: str) -> None:
    net, x = trained(name, space)
    model = net.to_torch()
    assert isinstance(model, nn.Sequential) and not model.training
    expected = host(net.predict(x))
    with torch.no_grad():
        found = model(torch.tensor(x)).numpy()
    assert found.dtype == expected.dtype and np.abs(found - expected).max() < TOLERANCE
    with torch.no_grad():
        for value in model.parameters():
            value += 1  # a copy: the network stays as it is
    assert np.array_equal(host(net.predict(x)), expected)


def test_a_weight_that_is_not_taken_over_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = trained("images")
    monkeypatch.setattr("hotloop.arrays.to_torch._copy_weights", lambda module, layer: module.double())
    with torch.no_grad():
        assert np.abs(net.to_torch()(torch.tensor(x)).numpy() - net.predict(x)).max() > 1e-3


def test_words() -> None:
    x = np.arange(12).reshape(4, 3) % 5
    net = a.Network([a.Embedding(5, 4), a.Dense(3)])
    net.fit(x, x[:, 0] % 3, progress=False)
    with torch.no_grad():
        assert np.allclose(net.to_torch()(torch.tensor(x)).numpy(), net.predict(x), atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_trains_the_model_as_the_network_trains_by_itself(name: str) -> None:
    make, sample = NETWORKS[name]
    layers = [layer for layer in make() if not isinstance(layer, a.Dropout)]  # each side draws its own masks
    net = a.Network([*layers, a.Dense(3)], optimizer=a.SGD(lr=0.1))
    x, y = np.random.default_rng(3).standard_normal((8, *sample)), np.arange(8) % 3
    net.predict(x)  # makes the weights
    model = net.to_torch().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = net.predict(x)
    for _ in range(3):
        net.step(x, y)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y)).backward()
        optimizer.step()
    found = model.eval()(torch.tensor(x)).detach().numpy()
    assert np.abs(net.predict(x) - before).max() > 1e-3
    assert np.abs(net.predict(x) - found).max() < TOLERANCE


def test_it_goes_on_training_as_a_task() -> None:
    net, x = trained("images")
    task = a_task(model=net.to_torch, data=(torch.tensor(x), torch.arange(8) % 3), batch_size=4)
    program = hotloop.lower(task)
    advance(program, 2)
    assert program.model.training


def test_what_cannot_be_given_back_is_one_line() -> None:
    class Mine(a.Layer):
        def forward(self, x: Any, training: bool = False) -> Any:
            return x

    x = np.ones((2, 3))
    for layer, says in ((a.Step(), "Step has no equivalent in torch"), (Mine(), "Mine has no equivalent")):
        net = a.Network([layer, a.Dense(3)])
        net.predict(x)
        with pytest.raises(TaskError, match=says):
            net.to_torch()
    with pytest.raises(TaskError, match=r"a network without weights.* Call fit or predict"):
        a.Network([a.Dense(3)]).to_torch()
