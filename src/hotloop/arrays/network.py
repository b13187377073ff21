"""A network: layers, a loss and an optimizer, trained on arrays in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import device

from hotloop.arrays.backend import Array, ArrayFactory, Shape, dtype_name, namespace, to_namespace
from hotloop.arrays.dense import Embedding
from hotloop.arrays.layer import Chain, Layer, check_integers, shape_after
from hotloop.arrays.losses import Loss, loss_of
from hotloop.arrays.optimizers import Memory, Optimizer, optimizer_of
from hotloop.arrays.to_torch import to_sequential
from hotloop.core.terminal import Bar, Terminal
from hotloop.errors import DataError, NonFiniteError, TaskError, type_name

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Epoch:
    """The results of one pass over the data.

    Attributes:
        number: from 1.
        train_loss, train_error: means over the epoch's batches, while the weights changed.
        test_loss, test_error: after the epoch; None without test data.
        seconds: duration with the test.
    """

    number: int
    train_loss: float
    train_error: float
    test_loss: float | None
    test_error: float | None
    seconds: float

    @property
    def last_error(self) -> float:
        """The test error; the training error without test data."""
        return self.train_error if self.test_error is None else self.test_error

    def __str__(self) -> str:
        tested = ""
        if self.test_error is not None:
            tested = f"  test loss {self.test_loss:.4f}  test error {self.test_error:.4f}"
        trained = f"train loss {self.train_loss:.4f}  train error {self.train_error:.4f}"
        return f"epoch {self.number}  {trained}{tested}  {self.seconds:.1f}s"


class ProgressDisplay:
    def __init__(self, epochs: int, batches: int, visible: bool) -> None:
        self.console = Terminal(stderr=False, quiet=not visible)
        self.bar = Bar(console=self.console, transient=True, disable=not (visible and self.console.is_terminal))
        self._epochs = epochs
        self._task = self.bar.add_task(f"epoch 1/{epochs}", total=batches)

    def step(self) -> None:
        self.bar.advance(self._task)

    def epoch(self, epoch: Epoch) -> None:
        self.console.print(str(epoch), markup=False, highlight=False, soft_wrap=True)
        if epoch.number < self._epochs:
            self.bar.reset(self._task, description=f"epoch {epoch.number + 1}/{self._epochs}")


@dataclass(frozen=True)
class LayerTime:
    """Times of a layer in a training step, in milliseconds, each the median of several steps."""

    layer: str
    forward_ms: float
    backward_ms: float
    update_ms: float

    def __str__(self) -> str:
        times = (self.forward_ms, self.backward_ms, self.update_ms)
        return "  ".join([f"{self.layer:24}", *(f"{ms:9.3f} ms" for ms in times)])


class Network:
    """Layers, trained by backpropagation (Rumelhart, Hinton, Williams: Learning representations by back-propagating
    errors, Nature 1986): forward, the loss, and the chain rule from the last layer to the first.

    The first batch sets dtype, device and shape of the weights.

    Args:
        layers: from the input on. For a cross entropy the last layer gives scores, without a softmax.
        optimizer: a name, such as `adam` or `sgd`, or an `Optimizer`, such as with another rate.
        loss: `cross_entropy`, `binary_cross_entropy`, `squared_error`, or a `Loss`.
        xp: the array library: `numpy`, `cupy`, `torch`, or another namespace of the array API standard. NumPy's arrays
            are converted; those of other libraries are refused.
        seed: seed of weights, dropout and the order of the samples.

    Attributes:
        steps, epochs: numbers of completed steps and epochs.

    Raises:
        PlanError: unknown optimizer, loss or namespace.
        TaskError: `layers` contains other objects.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: str | Optimizer = "adam",
        loss: str | Loss = "cross_entropy",
        xp: str | ModuleType = "numpy",
        seed: int = 0,
    ) -> None:
        self.chain = Chain(layers)
        self.optimizer, self.loss = optimizer_of(optimizer), loss_of(loss)
        self.xp, self.seed = namespace(xp), seed
        check_integers("Network", 0, seed=seed)
        self.steps = self.epochs = 0
        self._memory: dict[tuple[int, str], Memory] = {}
        self._sample: Any = None
        self._outputs: Shape = ()
        self._check_layers()

    def fit(
        self,
        x: Array,
        y: Array,
        x_test: Array = None,
        y_test: Array = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        stop_below: float | None = None,
        progress: bool = True,
    ) -> list[Epoch]:
        """Trains, and returns the results of each epoch.

        Args:
            x, y: (samples, ...) each; classes as whole numbers from 0 for a cross entropy, else floats.
            x_test, y_test: evaluated after each epoch.
            epochs: number of passes over the data, each in another order.
            batch_size: samples in a step; the last batch of an epoch may be smaller.
            stop_below: stops when the test error (without test data: the training error) is lower. The error is the share
                of wrong answers; for `squared_error`, the loss.
            progress: whether to show a bar on a terminal, and a line for each epoch.

        Raises:
            DataError: x or y is no array, or has a wrong namespace, dtype, length or label.
            DeviceError: an array is on another device.
            TaskError: a layer doesn't accept its input's shape.
            NonFiniteError: the loss is infinite or NaN.
        """
        check_integers("fit", 1, epochs=epochs, batch_size=batch_size)
        if stop_below is not None and not isinstance(stop_below, int | float):
            raise TaskError(f"stop_below={stop_below!r} of fit", expected="a number")
        x, y = self._data(x, y, "x", "y")
        tests = x_test is not None or y_test is not None
        test = self._data(x_test, y_test, "x_test", "y_test") if tests else None
        history: list[Epoch] = []
        display = ProgressDisplay(epochs, math.ceil(x.shape[0] / batch_size), progress)
        with display.bar:
            for epoch in range(epochs):
                began = time.perf_counter()
                loss, error = self._epoch(x, y, batch_size, display.step)
                tested = {} if test is None else self._evaluate(*test)
                seconds = time.perf_counter() - began
                history.append(Epoch(epoch + 1, loss, error, tested.get("loss"), tested.get("error"), seconds))
                display.epoch(history[-1])
                if stop_below is not None and history[-1].last_error < stop_below:
                    break
        return history

    def _epoch(self, x: Array, y: Array, batch_size: int, done: Any) -> tuple[float, float]:
        """Returns mean loss and error of one pass; sums them on the device and reads them once."""
        order = np.random.default_rng([self.seed, self.epochs]).permutation(x.shape[0])
        total = wrong = 0.0
        for first in range(0, x.shape[0], batch_size):
            rows = self.xp.asarray(order[first : first + batch_size], device=device(x))
            inputs, target = self.xp.take(x, rows, axis=0), self.xp.take(y, rows, axis=0)
            loss, output = self.step(inputs, target)
            total = total + loss * rows.shape[0]
            wrong = wrong + self.loss.error(output, target) * rows.shape[0]
            done()
        mean = float(total) / x.shape[0]
        self.epochs += 1
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"the loss of epoch {self.epochs} is {mean}",
                expected="a finite number",
                fix="lower the optimizer's lr, or check the data for NaN",
            )
        return mean, float(wrong) / x.shape[0]

    def step(self, x: Array, target: Array) -> tuple[Array, Array]:
        """Trains on one batch without checks; returns the loss, 0-dim, and the outputs."""
        output = self.chain.forward(x, training=True)
        loss = self.loss.forward(output, target)
        self.chain.backward(self.loss.backward())
        self.steps += 1
        for layer in self._leaves:
            self._update(layer)
        return loss, output

    def _update(self, layer: Layer) -> None:
        for name, weight in layer.weights.items():
            memory = self._memory.setdefault((id(layer), name), {}) or self.optimizer.memory(weight)
            self._memory[id(layer), name] = memory
            self.optimizer.update(weight, layer.gradients[name], memory, self.steps)

    def predict(self, x: Array, batch_size: int = 256) -> Array:
        """Returns the last layer's outputs, (samples, ...): scores, for a cross entropy.

        Raises:
            DataError, DeviceError, TaskError: as for `fit`.
        """
        x = self._inputs(x, "x")
        parts = [self.chain.forward(part) for (part,) in _minibatches(batch_size, x)]
        return self.xp.concat(parts, axis=0)

    def evaluate(self, x: Array, y: Array, batch_size: int = 256) -> dict[str, float]:
        """Returns `loss` and `error`; the error is the share of wrong answers, or the loss.

        Raises:
            DataError, DeviceError, TaskError: as for `fit`.
        """
        return self._evaluate(*self._data(x, y, "x", "y"), batch_size)

    def _evaluate(self, x: Array, y: Array, batch_size: int = 256) -> dict[str, float]:
        loss = error = 0.0
        for inputs, target in _minibatches(batch_size, x, y):
            output = self.chain.forward(inputs)
            loss = loss + self.loss.forward(output, target) * inputs.shape[0]
            error = error + self.loss.error(output, target) * inputs.shape[0]
        return {"loss": float(loss) / x.shape[0], "error": float(error) / x.shape[0]}

    def time_layers(self, x: Array, y: Array, repeats: int = 10) -> list[LayerTime]:
        """Times forward, backward and update of each layer on one batch; restores the weights.

        Args:
            x, y: one batch, as for `fit`.
            repeats: number of timed steps, after an untimed step.

        Raises:
            DataError, DeviceError, TaskError: as for `fit`.
        """
        check_integers("time_layers", 1, repeats=repeats)
        x, y = self._data(x, y, "x", "y")
        state, steps, memory = self.state(), self.steps, self._memory
        self._memory = {}
        try:
            timed = [self._timed_step(x, y) for _ in range(repeats + 1)][1:]
        finally:
            self.steps, self._memory = steps, memory
            self.restore(state)
        medians = 1e3 * np.median(np.array(timed), axis=0)
        return [LayerTime(repr(layer), *map(float, ms)) for layer, ms in zip(self.chain.layers, medians, strict=True)]

    def _timed_step(self, x: Array, y: Array) -> list[list[float]]:
        """Returns the seconds of forward, backward and update of each layer."""
        layers = self.chain.layers
        times = [[0.0] * 3 for _ in layers]
        for seconds, layer in zip(times, layers, strict=True):
            began = time.perf_counter()
            x = layer.forward(x, training=True)
            seconds[0] = _seconds_since(began, x)
        self.loss.forward(x, y)
        dy = self.loss.backward()
        for seconds, layer in zip(reversed(times), reversed(layers), strict=True):
            began = time.perf_counter()
            dy = layer.backward(dy)
            seconds[1] = _seconds_since(began, dy)
        self.steps += 1
        for seconds, layer in zip(times, layers, strict=True):
            began = time.perf_counter()
            weights = [weight for _, leaf in layer.leaves() for weight in leaf.weights.values()]
            for _, leaf in layer.leaves():
                self._update(leaf)
            seconds[2] = _seconds_since(began, weights[-1]) if weights else 0.0
        return times

    def state(self) -> dict[str, Array]:
        """Returns a copy of all weights and buffers, by names such as `0.weight`."""
        return {name: self.xp.asarray(value, copy=True) for name, value in self._layer_names()}

    def restore(self, state: dict[str, Array]) -> None:
        """Restores weights and buffers in place.

        Raises:
            TaskError: the state is of another network, or this network has no weights yet.
        """
        own = dict(self._layer_names())
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise TaskError(
                f"a state of {len(state)} arrays, and the network has {len(own)}",
                expected="equal names and shapes",
                fix="restore the result of state() of a network with the same layers, after a first batch",
            )
        for name, value in state.items():
            own[name][...] = value

    def to_torch(self) -> nn.Module:
        """Returns an `nn.Sequential` in evaluation mode of the same layers, with copies of the weights.

        A dense layer on more than vectors becomes `Flatten` and `Linear`; torch.fx makes the modules of residual sums,
        graphs and recurrent layers. `hotloop.Task(model=net.to_torch, ...)` continues the training.

        Raises:
            TaskError: the network has no weights before its first batch, or torch has no equivalent of a layer.
        """
        if self._sample is None:
            raise TaskError(
                "a network without weights: the first batch creates them",
                expected="a network after fit or predict",
                fix="call fit or predict before",
            )
        return to_sequential(self.chain, tuple(self._sample.shape[1:])).eval()

    def _layer_names(self) -> Iterator[tuple[str, Array]]:
        for place, layer in self.chain.leaves():
            for name, value in (layer.weights | layer.buffers).items():
                yield f"{place}.{name}", value

    def _data(self, x: Array, y: Array, name: str, target: str) -> tuple[Array, Array]:
        x = self._inputs(x, name)
        y = to_namespace(target, y, self.xp, device(x))
        if x.shape[0] != y.shape[0]:
            raise DataError(
                f"{name} has {x.shape[0]} samples and {target} has {y.shape[0]}",
                expected="equal numbers",
            )
        self.loss.check(y, self._outputs, target)
        floats = self.xp.isdtype(y.dtype, "real floating")
        return x, (self.xp.astype(y, self._dtype) if floats else y)

    def _inputs(self, x: Array, name: str) -> Array:
        x = to_namespace(name, x, self.xp, None if self._sample is None else device(self._sample))
        floats = self.xp.isdtype(x.dtype, "real floating")
        if self._embedding and not self.xp.isdtype(x.dtype, "integral"):
            raise DataError(f"{name} has dtype {dtype_name(x)}", expected="whole numbers, for an embedding")
        if not self._embedding and not floats:
            raise DataError(
                f"{name} has dtype {dtype_name(x)}",
                expected="floats to compute with",
                fix=f"use {name}.astype('float32'), for pixels divided by 255",
            )
        if floats and not bool(self.xp.all(self.xp.isfinite(x))):
            raise DataError(f"{name} holds NaN or infinity", expected="finite numbers", fix="clean the data")
        if self._sample is None:
            self._build(x)
        elif x.dtype != self._sample.dtype:
            raise DataError(
                f"{name} has dtype {dtype_name(x)}",
                expected=f"{dtype_name(self._sample)}, as the first batch had",
                fix=f"use {name}.astype('{dtype_name(self._sample)}')",
            )
        self._outputs = shape_after(self.chain, x.shape[1:])
        if self._embedding is not None:
            self._embedding.check(x, name)
        return x

    def _build(self, x: Array) -> None:
        shape_after(self.chain, x.shape[1:])  # reports a mismatch before any layer is built
        self._dtype = self.xp.float32 if self._embedding else x.dtype
        like = self.xp.zeros((1,), dtype=self._dtype, device=device(x))
        self.chain.build(x.shape[1:], ArrayFactory(self.xp, like, self.seed))
        self._sample = x[:1, ...]

    def _check_layers(self) -> None:
        self._leaves = [layer for _, layer in self.chain.leaves()]
        if not self._leaves:
            raise TaskError("a network without layers", expected="one or more")
        self._embedding = self._leaves[0] if isinstance(self._leaves[0], Embedding) else None
        final = self.loss.final
        if final is not None and type(self._leaves[-1]) is final:
            raise TaskError(
                f"the last layer is a {type_name(self._leaves[-1])[2:]}, and the loss "
                f"{type(self.loss).__name__} contains another",
                expected="scores",
                fix="leave that layer out",
            )
        twice = [repr(one) for place, one in enumerate(self._leaves) if one in self._leaves[:place]]
        if twice:
            raise TaskError(f"{twice[0]} is in the network twice", expected="each layer once", fix="make two layers")
        late = [repr(one) for one in self._leaves[1:] if isinstance(one, Embedding)]
        if late:
            raise TaskError(f"{late[0]} is not the first layer", expected="whole numbers, as the data has")


def _seconds_since(began: float, result: Array) -> float:
    """Reads a number of `result`, which waits for an asynchronous device, and returns the elapsed time."""
    if result is not None:
        float(result[(0,) * result.ndim])
    return time.perf_counter() - began


def _minibatches(size: int, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    check_integers("predict and evaluate", 1, batch_size=size)
    samples = arrays[0].shape[0]
    for first in range(0, samples, size):
        yield tuple(array[first : min(first + size, samples), ...] for array in arrays)
