"""Network: layers, a loss and an optimizer, trained on arrays in memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import device

from hotloop.arrays.backend import Array, ArrayFactory, Shape, namespace, to_namespace
from hotloop.arrays.dense import Embedding
from hotloop.arrays.epochs import Epoch, show_progress
from hotloop.arrays.layer import Chain, Layer, check_integers, shape_after
from hotloop.arrays.losses import Loss, loss_of
from hotloop.arrays.optimizers import Memory, Optimizer, optimizer_of
from hotloop.arrays.to_torch import to_sequential
from hotloop.errors import DataError, NonFiniteError, TaskError, type_name

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class LayerTime:
    """Where the time of a training step goes: milliseconds of a layer, each the median of several steps."""

    layer: str
    forward_ms: float
    backward_ms: float
    update_ms: float

    def __str__(self) -> str:
        times = (self.forward_ms, self.backward_ms, self.update_ms)
        return "  ".join([f"{self.layer:24}", *(f"{ms:9.3f} ms" for ms in times)])


class Network:
    """Layers, trained by backpropagation (Rumelhart, Hinton, Williams: Learning representations by back-propagating
    errors, Nature 1986): forward from the first layer to the last, the loss, and the chain rule back from the last.

    Weights are made for the first batch: in its dtype, on its device, for its shape.

    Args:
        layers: from the input on. For a cross entropy the last gives scores, without a softmax.
        optimizer: a name, such as `adam` or `sgd`, or an `Optimizer` with a rate of your own.
        loss: `cross_entropy`, `binary_cross_entropy`, `squared_error`, or a `Loss`.
        xp: whose arrays compute: `numpy`, `cupy`, `torch`, or another namespace of the array API standard. NumPy's
            arrays are taken there; those of any other are refused.
        seed: weights, dropout and the order of the samples follow from it.

    Attributes:
        steps, epochs: done so far.

    Raises:
        PlanError: no such optimizer, loss or namespace.
        TaskError: something among the layers is none.
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

    # --- training

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
        """Trains, and says what each epoch came to.

        Args:
            x, y: (samples, ...) each; classes as whole numbers from 0 for a cross entropy, else floats.
            x_test, y_test: looked at after each epoch, without training on them.
            epochs: times to go over the data, each time in another order.
            batch_size: samples in a step; the last batch of an epoch takes what is left.
            stop_below: stop when the test error (without test data: the training error) falls below this. It is the
                share of wrong answers; for `squared_error`, the loss.
            progress: show a bar where there is a terminal, and a line for each epoch.

        Raises:
            DataError: what x or y can't be: no array, of another namespace, dtype or length, labels out of range.
            DeviceError: an array is on another device than the others.
            TaskError: a layer can't take what the one before it gives; the message names it.
            NonFiniteError: the loss became infinite or no number.
        """
        check_integers("fit", 1, epochs=epochs, batch_size=batch_size)
        if stop_below is not None and not isinstance(stop_below, int | float):
            raise TaskError(f"stop_below={stop_below!r} of fit", expected="a number")
        x, y = self._data(x, y, "x", "y")
        tests = x_test is not None or y_test is not None
        test = self._data(x_test, y_test, "x_test", "y_test") if tests else None
        history: list[Epoch] = []
        with show_progress(epochs, math.ceil(x.shape[0] / batch_size), progress) as show:
            for epoch in range(epochs):
                began = time.perf_counter()
                loss, error = self._epoch(x, y, batch_size, show.step)
                tested = {} if test is None else self._evaluate(*test)
                found = Epoch(
                    epoch + 1, loss, error, tested.get("loss"), tested.get("error"), time.perf_counter() - began
                )
                history.append(found)
                show.epoch(found)
                if stop_below is not None and found.last_error < stop_below:
                    break
        return history

    def _epoch(self, x: Array, y: Array, batch_size: int, done: Any) -> tuple[float, float]:
        """Mean loss and error of one pass; they are added up where they are computed, and read once."""
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
        """Forward, loss, backward and update on one batch; returns the loss, 0-dim, and what the network said.

        It checks nothing: `fit` has looked at the data before.
        """
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

    # --- use

    def predict(self, x: Array, batch_size: int = 256) -> Array:
        """What the last layer gives for each sample, (samples, ...): scores, for a cross entropy.

        Raises:
            DataError, DeviceError, TaskError: as for `fit`.
        """
        x = self._inputs(x, "x")
        parts = [self.chain.forward(part) for (part,) in _minibatches(batch_size, x)]
        return self.xp.concat(parts, axis=0)

    def evaluate(self, x: Array, y: Array, batch_size: int = 256) -> dict[str, float]:
        """`loss` and `error` on some data; the error is the share of wrong answers, or again the loss.

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
        """How long each layer takes, forward, backward and update, on one batch; weights are as before afterwards.

        Args:
            x, y: one batch, as for `fit`.
            repeats: steps that are timed, after one that isn't.

        Raises:
            DataError, DeviceError, TaskError: as for `fit`.
        """
        check_integers("time_layers", 1, repeats=repeats)
        x, y = self._data(x, y, "x", "y")
        kept, steps, memory = self.state(), self.steps, self._memory
        self._memory = {}
        try:
            timed = [self._timed_step(x, y) for _ in range(repeats + 1)][1:]
        finally:
            self.steps, self._memory = steps, memory
            self.restore(kept)
        medians = 1e3 * np.median(np.array(timed), axis=0)
        return [LayerTime(repr(layer), *map(float, ms)) for layer, ms in zip(self.chain.layers, medians, strict=True)]

    def _timed_step(self, x: Array, y: Array) -> list[list[float]]:
        """Seconds of forward, backward and update of each layer."""
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

    # --- weights

    def state(self) -> dict[str, Array]:
        """A copy of all weights and buffers, by names such as `0.weight`."""
        return {name: self.xp.asarray(value, copy=True) for name, value in self._layer_names()}

    def restore(self, state: dict[str, Array]) -> None:
        """Puts weights and buffers back, in place.

        Raises:
            TaskError: they are of another network, or this one has seen no batch yet.
        """
        own = dict(self._layer_names())
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise TaskError(
                f"a state of {len(state)} arrays, and the network has {len(own)}",
                expected="equal names and shapes",
                fix="restore what the state() of a network of the same layers gave, after a first batch",
            )
        for name, value in state.items():
            own[name][...] = value

    def to_torch(self) -> nn.Module:
        """The network as an `nn.Sequential` of the same layers with copies of the weights, set to evaluate.

        A dense layer that gets more than vectors becomes two modules, `Flatten` and `Linear`; residual sums, graphs and
        recurrent layers become modules that torch.fx makes. `hotloop.Task(model=net.to_torch, ...)` trains on from here.

        Raises:
            TaskError: the network has seen no batch yet, and so has no weights; or torch has nothing like a layer.
        """
        if self._sample is None:
            raise TaskError(
                "a network without weights, which come with the first batch",
                expected="one that was trained, or has predicted",
                fix="call fit or predict before",
            )
        return to_sequential(self.chain, tuple(self._sample.shape[1:])).eval()

    def _layer_names(self) -> Iterator[tuple[str, Array]]:
        for place, layer in self.chain.leaves():
            for name, value in (layer.weights | layer.buffers).items():
                yield f"{place}.{name}", value

    # --- what may come in

    def _data(self, x: Array, y: Array, name: str, target: str) -> tuple[Array, Array]:
        x = self._inputs(x, name)
        y = to_namespace(target, y, self.xp, device(x))
        if x.shape[0] != y.shape[0]:
            raise DataError(
                f"{name} has {x.shape[0]} samples and {target} has {y.shape[0]}",
                expected="as many of one as of the other",
            )
        self.loss.check(y, self._outputs, target)
        floats = self.xp.isdtype(y.dtype, "real floating")
        return x, (self.xp.astype(y, self._dtype) if floats else y)

    def _inputs(self, x: Array, name: str) -> Array:
        """Checks inputs, and makes the weights for the first."""
        x = to_namespace(name, x, self.xp, None if self._sample is None else device(self._sample))
        floats = self.xp.isdtype(x.dtype, "real floating")
        if self._embedding and not self.xp.isdtype(x.dtype, "integral"):
            raise DataError(f"{name} has dtype {_dtype(x)}", expected="whole numbers, for an embedding")
        if not self._embedding and not floats:
            raise DataError(
                f"{name} has dtype {_dtype(x)}",
                expected="floats to compute with",
                fix=f"use {name}.astype('float32'), for pixels divided by 255",
            )
        if floats and not bool(self.xp.all(self.xp.isfinite(x))):
            raise DataError(f"{name} holds NaN or infinity", expected="finite numbers", fix="clean the data")
        if self._sample is None:
            self._build(x)
        elif x.dtype != self._sample.dtype:
            raise DataError(
                f"{name} has dtype {_dtype(x)}",
                expected=f"{_dtype(self._sample)}, as the first batch had",
                fix=f"use {name}.astype('{_dtype(self._sample)}')",
            )
        self._outputs = shape_after(self.chain, x.shape[1:])
        if self._embedding is not None:
            self._embedding.check(x, name)
        return x

    def _build(self, x: Array) -> None:
        shape_after(self.chain, x.shape[1:])  # names the layer that doesn't fit, before any is made
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
                f"the last layer is a {type_name(self._leaves[-1])[2:]}, and {type(self.loss).__name__} has one of its own",
                expected="scores",
                fix="leave that layer out",
            )
        twice = [repr(one) for place, one in enumerate(self._leaves) if one in self._leaves[:place]]
        if twice:
            raise TaskError(f"{twice[0]} stands twice in the network", expected="each layer once", fix="make two of it")
        late = [repr(one) for one in self._leaves[1:] if isinstance(one, Embedding)]
        if late:
            raise TaskError(f"{late[0]} is not the first layer", expected="whole numbers, as the data has")


def _seconds_since(began: float, result: Array) -> float:
    """Seconds since then, once `result` is there: reading one number of it waits for a device that computes ahead."""
    if result is not None:
        float(result[(0,) * result.ndim])
    return time.perf_counter() - began


def _minibatches(size: int, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    check_integers("predict and evaluate", 1, batch_size=size)
    samples = arrays[0].shape[0]
    for first in range(0, samples, size):
        yield tuple(array[first : min(first + size, samples), ...] for array in arrays)


def _dtype(array: Array) -> str:
    return str(array.dtype).rpartition(".")[2]
