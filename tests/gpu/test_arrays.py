"""The written-out layers on CuPy give what they give on NumPy, and `engine=arrays` trains on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotloop
from hotloop.arrays.activations import ReLU
from hotloop.arrays.backend import namespace
from hotloop.arrays.conv import Conv, MaxPool
from hotloop.arrays.dense import Dense, Dropout
from hotloop.arrays.network import Network
from hotloop.arrays.optimizers import Adam
from hotloop.core.state import differing_paths
from hotloop.errors import DataError
from hotloop.plan import Plan
from tests.lowering.test_cpu_plans import STEPS, after, assert_equal_within_rounding
from tests.support import array_layer_checks
from tests.support.array_layer_checks import CASES, QUIET, compare
from tests.support.programs import through_file
from tests.support.tasks.model_families import CLASSES, family

pytestmark = pytest.mark.gpu

ON = "cuda:0"


@pytest.fixture(autouse=True)
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="pip install 'hotloop[cupy]'")


@pytest.mark.parametrize("name", CASES)
def test_a_layer_gives_what_torch_gives(name: str, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_layer_checks, "host", cupy.asnumpy)

    @settings(max_examples=5, **QUIET)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare(CASES[name], data.draw, namespace("cupy"))

    agrees()


def test_a_network_trains_as_on_numpy() -> None:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((40, 1, 8, 8)), random.integers(0, 3, 40)

    def losses(xp: str) -> list[float]:
        net = Network([Conv(4, 3, pad=1), ReLU(), MaxPool(2), Dropout(0.2), Dense(3)], optimizer=Adam(lr=0.01), xp=xp)
        history = net.fit(x, y, x, y, epochs=3, batch_size=8, progress=False)
        assert all(time.forward_ms > 0 for time in net.time_layers(x[:8], y[:8], repeats=2))
        return [epoch.train_loss for epoch in history]

    assert losses("cupy") == pytest.approx(losses("numpy"), rel=1e-9)


def test_arrays_of_another_library_are_refused(cupy: Any) -> None:
    x, y = cupy.zeros((4, 3)), np.zeros(4, dtype="int64")
    with pytest.raises(DataError, match="x is an array of cupy"):
        Network([Dense(3)]).fit(x, y, progress=False)


def plain() -> torch.nn.Module:
    """Without dropout, which torch's GPU kernel draws otherwise."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, CLASSES),
    )


def test_a_task_trains_as_under_the_baseline_there() -> None:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        expected = after(hotloop.lower(family("cnn", model=plain), Plan(device=ON)), STEPS)
        program = hotloop.lower(family("cnn", model=plain), Plan(device=ON, engine="arrays"))
        state = after(program, STEPS)
    assert_equal_within_rounding(state, expected)
    program.restore(through_file(state))
    assert differing_paths(program.state(), state) == []
