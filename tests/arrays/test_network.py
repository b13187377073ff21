"""Networks of `hotloop.arrays`: training, use, and what a user's mistakes look like. Nothing here needs torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import pytest

from hotloop.arrays.activations import ReLU, Sigmoid, Softmax, Tanh
from hotloop.arrays.conv import AveragePool, Conv, MaxPool
from hotloop.arrays.dense import BatchNorm, Dense, Dropout, Embedding, LayerNorm
from hotloop.arrays.layer import Residual
from hotloop.arrays.losses import BinaryCrossEntropy
from hotloop.arrays.network import Network
from hotloop.arrays.optimizers import SGD, Adam
from hotloop.arrays.recurrent import LSTM, RNN
from hotloop.errors import DataError, DeviceError, HotloopError, NonFiniteError, PlanError, TaskError


def spots(samples: int = 64, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Images (samples, 1, 6, 6) with a bright spot in one of four corners, which is the label."""
    random = np.random.default_rng(0)
    x, y = 0.3 * random.standard_normal((samples, 1, 6, 6)), random.integers(0, 4, samples)
    for image, corner in zip(x[:, 0], y, strict=True):
        image[3 * (corner // 2) + 1, 3 * (corner % 2) + 1] += 3
    return x.astype(dtype), y


def small(**options: Any) -> Network:
    return Network([Conv(4, 3, pad=1), MaxPool(2), Dense(10), ReLU(), Dense(4)], **options)


SPACES = ("numpy", "array_api_strict")


@pytest.mark.parametrize("space", SPACES)
def test_it_learns(space: str) -> None:
    x, y = spots()
    net = small(optimizer=Adam(lr=0.02), xp=space)
    history = net.fit(x[:48], y[:48], x[48:], y[48:], epochs=6, batch_size=8, progress=False)
    assert [epoch.number for epoch in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1].test_error is not None and history[-1].test_error < 0.1
    assert history[-1].train_loss < history[0].train_loss / 3
    assert net.evaluate(x[48:], y[48:]) == {"loss": history[-1].test_loss, "error": history[-1].test_error}
    assert np.from_dlpack(net.predict(x)).shape == (64, 4)


LAYERS: dict[str, tuple[list[Callable[[], Any]], tuple[int, ...]]] = {
    "images": (
        [lambda: Conv(4, 3, pad=1), BatchNorm, lambda: Residual([Conv(4, 3, pad=1), ReLU()]), lambda: MaxPool(2)],
        (2, 6, 6),
    ),
    "means": ([lambda: Conv(4, 3, groups=2), AveragePool, lambda: Dropout(0.1)], (2, 6, 6)),
    "sequences": ([lambda: RNN(5), LayerNorm, lambda: LSTM(4, last=True)], (3, 2)),
    "vectors": ([lambda: Dense(5), Sigmoid, lambda: Dense(4, bias=False), Tanh], (6,)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("space", SPACES)
def test_every_layer_trains_in_every_namespace_alike(kind: str, space: str) -> None:
    made, sample = LAYERS[kind]
    random = np.random.default_rng(1)
    x, y = random.standard_normal((12, *sample)), random.integers(0, 3, 12)

    def trained(xp: str) -> list[float]:
        net = Network([*(make() for make in made), Dense(3)], xp=xp)
        return [epoch.train_loss for epoch in net.fit(x, y, epochs=2, batch_size=5, progress=False)]

    assert trained(space) == pytest.approx(trained("numpy"), rel=1e-12)


def test_words() -> None:
    random = np.random.default_rng(2)
    x = random.integers(0, 9, (80, 4))
    y = (x[:, 0] > 4).astype("int64")
    net = Network([Embedding(9, 6), Dense(2)], optimizer=Adam(lr=0.05))
    assert net.fit(x, y, epochs=12, batch_size=8, progress=False)[-1].train_error < 0.05


@pytest.mark.parametrize("loss", ["squared_error", "binary_cross_entropy"])
def test_other_losses(loss: str) -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((80, 3))
    y = (x[:, :1] > 0).astype("float64")
    net = Network([Dense(8), Tanh(), Dense(1)], loss=loss, optimizer=Adam(lr=0.02))
    history = net.fit(x, y, epochs=15, batch_size=8, progress=False)
    assert history[-1].train_error < 0.1 < history[0].train_error


def test_the_same_seed_gives_the_same_training_and_another_gives_another() -> None:
    x, y = spots()

    def losses(seed: int) -> list[float]:
        net = Network([Dropout(0.2), Dense(4)], seed=seed)
        return [epoch.train_loss for epoch in net.fit(x, y, epochs=2, progress=False)]

    assert losses(1) == losses(1) != losses(2)


def test_each_epoch_takes_every_sample_once_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    step = Network.step
    monkeypatch.setattr(Network, "step", lambda self, x, y: seen.append(x[:, 0].tolist()) or step(self, x, y))
    x = np.arange(10.0)[:, None]
    net = Network([Dense(1)], loss="squared_error")
    net.fit(x, x / 10, epochs=2, batch_size=4, progress=False)
    assert [len(batch) for batch in seen] == [4, 4, 2] * 2
    first, second = ([number for batch in half for number in batch] for half in (seen[:3], seen[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    net.fit(x, x / 10, epochs=1, batch_size=4, progress=False)  # goes on with a third
    assert [number for batch in seen[6:] for number in batch] not in (first, second)


def test_it_stops_below_a_threshold() -> None:
    x, y = spots()
    for test in ((), (x, y)):
        history = small(optimizer=Adam(lr=0.02)).fit(
            x, y, *test, epochs=50, batch_size=8, stop_below=0.03, progress=False
        )
        assert 1 < len(history) < 50
        assert history[-1].last_error < 0.03 <= history[-2].last_error


def test_it_shows_each_epoch_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = spots()
    small().fit(x, y, x, y, epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["epoch", "1"], ["epoch", "2"]]
    assert all("train error" in line and "test error" in line for line in lines)
    small().fit(x, y, epochs=1, progress=False)
    assert capsys.readouterr().out == ""


def test_the_time_of_each_layer_and_nothing_is_changed() -> None:
    x, y = spots()
    one, other = (small(xp="numpy") for _ in range(2))
    one.fit(x, y, epochs=1, batch_size=8, progress=False), other.fit(x, y, epochs=1, batch_size=8, progress=False)
    before = one.state()
    times = one.time_layers(x[:8], y[:8], repeats=3)
    assert [time.layer for time in times] == ["Conv(4, 3x3)", "MaxPool(2x2)", "Dense(10)", "ReLU", "Dense(4)"]
    assert all(time.forward_ms > 0 and time.backward_ms > 0 for time in times)
    assert [time.update_ms > 0 for time in times] == [True, False, True, False, True]
    assert all(np.array_equal(value, before[name]) for name, value in one.state().items())
    again = [net.fit(x, y, epochs=1, batch_size=8, progress=False)[0].train_loss for net in (one, other)]
    assert again[0] == again[1], "timing has left its steps in the optimizer"


def test_a_state_goes_into_another_network_of_the_same_layers() -> None:
    x, y = spots()
    one, other = small(seed=1), small(seed=2)
    one.fit(x, y, epochs=1, progress=False), other.predict(x)
    assert not np.array_equal(one.predict(x), other.predict(x))
    other.restore(one.state())
    assert np.array_equal(one.predict(x), other.predict(x))
    with pytest.raises(TaskError, match="equal names"):
        Network([Dense(3)]).restore(one.state())


def test_weights_have_the_dtype_of_the_data() -> None:
    for dtype in ("float32", "float64"):
        x, y = spots(dtype=dtype)
        net = small()
        net.fit(x, y, epochs=1, progress=False)
        assert {str(value.dtype) for value in net.state().values()} == {dtype}
        assert net.predict(x).dtype == dtype


# --- mistakes

X, Y = spots(16)
FLAT = X.reshape(16, -1)


def fitted(net: Network, x: Any = X, y: Any = Y, *more: Any, **options: Any) -> None:
    net.fit(x, y, *more, **{"epochs": 1, "progress": False} | options)


def trained() -> Network:
    net = small()
    fitted(net)
    return net


ELSEWHERE = array_api_strict.Device("device1")

MISTAKES: dict[str, tuple[Callable[[], Any], type[HotloopError], tuple[str, ...]]] = {
    "a vector for a convolution": (
        lambda: fitted(small(), FLAT), TaskError,
        ("layer 0, Conv(4, 3x3), gets samples of shape (36,)", "expected images (channels, height, width)"),
    ),
    "a window larger than the image": (
        lambda: fitted(Network([Conv(4, 3), MaxPool(2), Conv(2, 5)])), TaskError,
        ("layer 2, Conv(2, 5x5), gets samples of shape (4, 2, 2)", "a window of 5 x 5"),
    ),
    "within a residual": (
        lambda: fitted(Network([Conv(4, 3), Residual([ReLU(), Conv(2, 3, pad=1)])])), TaskError,
        ("layer 1, Residual(", "(4, 4, 4)", "the same shape; they give (2, 4, 4)"),
    ),
    "deep inside": (
        lambda: fitted(Network([Conv(4, 3), Residual([ReLU(), LSTM(3)])])), TaskError,
        ("layer 1.1, LSTM(3), gets samples of shape (4, 4, 4)", "sequences"),
    ),
    "groups that don't divide": (
        lambda: fitted(Network([Conv(4, 3), Conv(6, 3, groups=3)])), TaskError, ("layer 1", "3 groups"),
    ),
    "other shapes than before": (
        lambda: trained().predict(X[:, :, :5]), TaskError, ("layer 2, Dense(10)", "(4, 2, 3)", "expected 36 numbers"),
    ),
    "other channels than before": (
        lambda: trained().predict(np.concatenate([X, X], axis=1)), TaskError, ("layer 0", "images of 1 channels"),
    ),
    "labels above": (
        lambda: fitted(small(), X, Y + 1), DataError, ("y has the label 4", "from 0 to 3", "gives 4 scores"),
    ),
    "labels below": (lambda: fitted(small(), X, Y - 1), DataError, ("y has the label -1",)),
    "test labels": (
        lambda: fitted(small(), X, Y, X, Y + 1), DataError, ("y_test has the label 4",),
    ),
    "labels as floats": (
        lambda: fitted(small(), X, Y.astype("float32")), DataError, ("y has dtype float32", "y.astype('int64')"),
    ),
    "labels as a column": (lambda: fitted(small(), X, Y[:, None]), DataError, ("a sample of y has shape (1,)", "()")),
    "whole targets for a squared error": (
        lambda: fitted(Network([Dense(1)], loss="squared_error"), X, Y[:, None]), DataError, ("y has dtype int64",),
    ),
    "a target of another shape": (
        lambda: fitted(Network([Dense(1)], loss="squared_error"), X, Y.astype("float32")), DataError,
        ("a sample of y has shape ()", "(1,)"),
    ),
    "more than a probability": (
        lambda: fitted(Network([Dense(1)], loss=BinaryCrossEntropy()), X, Y[:, None].astype("float32")), DataError,
        ("outside of 0 to 1",),
    ),
    "unequal lengths": (lambda: fitted(small(), X, Y[:9]), DataError, ("x has 16 samples and y has 9",)),
    "no samples": (lambda: fitted(small(), X[:0], Y[:0]), DataError, ("x has shape (0, 1, 6, 6)",)),
    "NaN": (lambda: fitted(small(), X * np.nan), DataError, ("x holds NaN",)),
    "whole numbers": (
        lambda: fitted(small(), (99 * X).astype("uint8")), DataError,
        ("x has dtype uint8", "expected floats", "divided by 255"),
    ),
    "a list": (lambda: fitted(small(), X.tolist()), DataError, ("x is a list", "numpy.asarray(x)")),
    "no y": (lambda: fitted(small(), X, None), DataError, ("y is None", "expected an array")),
    "another dtype than before": (
        lambda: trained().predict(X.astype("float64")), DataError, ("x has dtype float64", "expected float32"),
    ),
    "another namespace": (
        lambda: fitted(small(), array_api_strict.asarray(X)), DataError,
        ("x is an array of array_api_strict, and the network computes in numpy", 'xp="array_api_strict"'),
    ),
    "mixed namespaces": (
        lambda: fitted(small(), X, array_api_strict.asarray(Y)), DataError, ("y is an array of array_api_strict",),
    ),
    "mixed devices": (
        lambda: fitted(
            small(xp="array_api_strict"),
            array_api_strict.asarray(X, device=ELSEWHERE), array_api_strict.asarray(Y),
        ),
        DeviceError, ("y is on", "CPU_DEVICE", "device1", "one device"),
    ),
    "words out of the list": (
        lambda: fitted(Network([Embedding(3, 2), Dense(4)]), Y[:, None]), DataError,
        ("holds 3", "from 0 to 2", "Embedding(3, 2)"),
    ),
    "floats for an embedding": (
        lambda: fitted(Network([Embedding(3, 2), Dense(4)]), FLAT), DataError, ("x has dtype float32", "whole numbers"),
    ),
    "an embedding in the middle": (
        lambda: Network([Dense(4), Embedding(3, 2)]), TaskError, ("Embedding(3, 2) is not the first layer",),
    ),
    "two softmaxes": (lambda: Network([Dense(4), Softmax()]), TaskError, ("the last layer is a Softmax", "scores")),
    "a class for a layer": (lambda: Network([Dense(4), ReLU]), TaskError, ("the class ReLU", "such as Dense(100)")),
    "a number for a layer": (lambda: Network([Dense(4), 3]), TaskError, ("an int stands among the layers",)),
    "no layers": (lambda: Network([]), TaskError, ("without layers",)),
    "a layer in place of a list": (lambda: Network(Dense(4)), TaskError, ("a Dense in place of a list",)),
    "a beta of one": (lambda: Adam(beta2=1), PlanError, ("beta2=1 of Adam", "below 1")),
    "a rate in words": (lambda: Adam(lr="fast"), PlanError, ("lr='fast' of Adam",)),
    "a layer twice": (lambda: Network([one := Dense(4), ReLU(), one]), TaskError, ("Dense(4) is in the network twice",)),
    "an unknown optimizer": (lambda: small(optimizer="adamm"), PlanError, ("optimizer='adamm'", "adam, adamw")),
    "no optimizer": (lambda: small(optimizer=None), PlanError, ("optimizer=None",)),
    "an unknown loss": (lambda: small(loss="mse"), PlanError, ("loss='mse'", "squared_error")),
    "an unknown namespace": (lambda: small(xp="numpi"), PlanError, ("xp='numpi'", "no numpi here", 'xp="numpy"')),
    "a namespace of no arrays": (lambda: small(xp="json"), PlanError, ("xp='json' has no arrays",)),
    "a negative rate": (lambda: SGD(lr=-1.0), PlanError, ("lr=-1.0 of SGD", "0 or more")),
    "no epochs": (lambda: fitted(small(), epochs=0), TaskError, ("epochs=0 of fit", "1 or more")),
    "half a sample": (lambda: fitted(small(), batch_size=0.5), TaskError, ("batch_size=0.5",)),
    "a threshold in words": (lambda: fitted(small(), stop_below="low"), TaskError, ("stop_below='low'",)),
    "y_test alone": (lambda: fitted(small(), X, Y, None, Y), DataError, ("x_test is None",)),
    "x_test alone": (lambda: fitted(small(), X, Y, X), DataError, ("y_test is None",)),
    "a negative seed": (lambda: small(seed=-1), TaskError, ("seed=-1 of Network",)),
    "no units": (lambda: Dense(0), TaskError, ("units=0 of Dense",)),
    "a layer's size in words": (lambda: LSTM("ten"), TaskError, ("units='ten' of LSTM",)),
    "no stride": (lambda: Conv(3, 3, stride=0), TaskError, ("stride=0 of a window", "1 or more")),
    "three sizes": (lambda: MaxPool((2, 2, 2)), TaskError, ("size=(2, 2, 2) of a window", "rows and columns")),
    "a pool beside the image": (lambda: MaxPool(2, pad=2), TaskError, ("pad=2 around", "half of the window")),
    "more than all": (lambda: Dropout(1.5), TaskError, ("p=1.5 of Dropout", "0 to 1")),
    "one number for a variance": (
        lambda: fitted(Network([BatchNorm(), Dense(4)]), FLAT, Y, batch_size=5), DataError, ("single number for each",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line(name: str) -> None:
    make, error, says = MISTAKES[name]
    with pytest.raises(error) as caught:
        make()
    line = str(caught.value)
    assert "\n" not in line
    assert [words for words in says if words not in line] == [], line


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_a_loss_that_is_no_number_any_more_stops_the_training() -> None:
    with pytest.raises(NonFiniteError, match=r"the loss of epoch \d is .* lr"):
        net = Network([Dense(1)], optimizer=SGD(lr=1e9), loss="squared_error")
        fitted(net, X, Y[:, None].astype("float32"), epochs=30, batch_size=2)


def test_a_missing_cupy_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "array_api_compat.cupy", raising=False)
    with pytest.raises(PlanError, match=r"no cupy here.*pip install 'hotloop\[cupy\]'"):
        small(xp="cupy")


def test_a_whole_training_imports_no_torch() -> None:
    code = """
import sys
import numpy as np
from hotloop.arrays import *
x, y = np.random.default_rng(0).standard_normal((8, 1, 6, 6)), np.arange(8) % 3
net = Network([Conv(2, 3), GELU(), MaxPool(2), Dropout(), Dense(3)])
net.fit(x, y, x, y, epochs=1), net.predict(x), net.evaluate(x, y), net.time_layers(x, y)
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
