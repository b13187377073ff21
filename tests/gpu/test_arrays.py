"""The written-out layers on CuPy give what they give on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.arrays.activations import ReLU
from hotloop.arrays.backend import namespace
from hotloop.arrays.conv import Conv, MaxPool
from hotloop.arrays.dense import Dense, Dropout
from hotloop.arrays.network import Network
from hotloop.arrays.optimizers import Adam
from hotloop.errors import DataError
from tests.support import array_layer_checks
from tests.support.array_layer_checks import CASES, QUIET, compare

pytestmark = pytest.mark.gpu


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
