"""Losses: a number from outputs and targets, and its derivative, with which backward begins."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from hotloop.arrays.activations import Sigmoid, Softmax, sigmoid
from hotloop.arrays.backend import Array, Shape, dtype_name
from hotloop.arrays.layer import Layer
from hotloop.errors import DataError, PlanError, TaskError, type_name


class Loss:
    """A mean over the batch, L; `backward` returns dY, its derivative with respect to the outputs."""

    final: type[Layer] | None = None
    """The activation that the loss contains, so that the network must not end in it."""

    def forward(self, y: Array, target: Array) -> Array:
        """Returns L, 0-dim."""
        raise NotImplementedError

    def backward(self) -> Array:
        """Returns dY, of the shape of Y."""
        raise NotImplementedError

    def error(self, y: Array, target: Array) -> Array:
        """Returns the share of wrong answers, 0-dim; the loss if answers aren't right or wrong."""
        raise NotImplementedError

    def check(self, target: Array, output: Shape, name: str) -> None:
        """Checks the targets of the data `name` for outputs of shape (n, *output).

        Raises:
            DataError: dtype, shape or values are wrong.
        """
        _check_shape(target, output, name)
        if not array_namespace(target).isdtype(target.dtype, "real floating"):
            raise DataError(
                f"{name} has dtype {dtype_name(target)}",
                expected="floats for this loss",
                fix=f"use {name}.astype('float32')",
            )


class SquaredError(Loss):
    """The mean of the squares, over all numbers.

    forward   L  = Σ (Y - T)² / N      Y, T (n, ...) of N numbers
    backward  dY = 2 (Y - T) / N
    """

    def forward(self, y: Array, target: Array) -> Array:
        self._difference = y - target
        return array_namespace(y).mean(self._difference * self._difference)

    def backward(self) -> Array:
        return 2 * self._difference / math.prod(self._difference.shape)

    def error(self, y: Array, target: Array) -> Array:
        return array_namespace(y).mean((y - target) ** 2)


class BinaryCrossEntropy(Loss):
    """The cross entropy of two classes: Y are scores, and σ(Y) = 1 / (1 + e⁻ʸ) the probabilities of yes.

    forward   L  = Σ (ln(1 + eʸ) - T Y) / N     = -Σ (T ln σ(Y) + (1 - T) ln(1 - σ(Y))) / N; Y, T (n, ...) of N numbers
    backward  dY = (σ(Y) - T) / N               T between 0 and 1
    """

    final = Sigmoid

    def forward(self, y: Array, target: Array) -> Array:
        xp = array_namespace(y)
        self._y, self._target = y, target
        return xp.mean(xp.logaddexp(y, xp.zeros_like(y)) - target * y)

    def backward(self) -> Array:
        return (sigmoid(self._y) - self._target) / math.prod(self._y.shape)

    def error(self, y: Array, target: Array) -> Array:
        xp = array_namespace(y)
        return xp.mean(xp.astype((y > 0) != (target > 0.5), y.dtype))

    def check(self, target: Array, output: Shape, name: str) -> None:
        super().check(target, output, name)
        xp = array_namespace(target)
        if not bool(xp.all((target >= 0) & (target <= 1))):
            raise DataError(f"{name} has numbers outside of 0 to 1", expected="probabilities of the class 1")


class CrossEntropy(Loss):
    """The cross entropy of c classes: Y are scores, and P = softmax Y the probabilities of the classes.

        forward   L  = -Σ H ∘ ln P / N      Y, P, H (n, c) or (n, c, ...)   H one-hot: 1 at the right class
        backward  dY = (P - H) / N          N counts the labels, (n) or (n, ...), that are not `ignored`

    Args:
        ignored: label of positions that don't count, or None.
    """

    final = Softmax

    def __init__(self, ignored: int | None = None) -> None:
        self.ignored = ignored

    def forward(self, y: Array, target: Array) -> Array:
        xp = array_namespace(y)
        shifted = y - xp.max(y, axis=1, keepdims=True)
        log = shifted - xp.log(xp.sum(xp.exp(shifted), axis=1, keepdims=True))
        classes = xp.reshape(xp.arange(y.shape[1], dtype=target.dtype, device=y.device), (1, -1, *(1,) * (y.ndim - 2)))
        labels = xp.expand_dims(target, axis=1)
        self._hot, self._p = xp.astype(labels == classes, y.dtype), xp.exp(log)
        self._counted = xp.astype(labels != self.ignored, y.dtype) if self.ignored is not None else None
        self._n = math.prod(target.shape) if self._counted is None else xp.sum(self._counted)
        return -xp.sum(self._hot * log) / self._n

    def backward(self) -> Array:
        dy = (self._p - self._hot) / self._n
        return dy if self._counted is None else dy * self._counted

    def error(self, y: Array, target: Array) -> Array:
        xp = array_namespace(y)
        wrong = xp.astype(xp.argmax(y, axis=1) != target, y.dtype)
        if self.ignored is None:
            return xp.mean(wrong)
        counted = xp.astype(target != self.ignored, y.dtype)
        return xp.sum(wrong * counted) / xp.sum(counted)

    def check(self, target: Array, output: Shape, name: str) -> None:
        xp = array_namespace(target)
        if not xp.isdtype(target.dtype, "integral"):
            raise DataError(
                f"{name} has dtype {dtype_name(target)}",
                expected="whole numbers from 0, the classes, for a cross entropy",
                fix=f"use {name}.astype('int64')",
            )
        if not output:
            raise TaskError("the network gives one number for each sample", expected="a score for each class")
        _check_shape(target, output[1:], name)
        counted = target if self.ignored is None else xp.where(target == self.ignored, xp.zeros_like(target), target)
        low, high = int(xp.min(counted)), int(xp.max(counted))
        if low < 0 or high >= output[0]:
            raise DataError(
                f"{name} has the label {low if low < 0 else high}",
                expected=f"labels from 0 to {output[0] - 1}, since the network gives {output[0]} scores",
                fix="number the classes from 0, or change the last layer",
            )


def _check_shape(target: Array, output: Shape, name: str) -> None:
    if tuple(target.shape[1:]) != tuple(output):
        raise DataError(
            f"a sample of {name} has shape {tuple(target.shape[1:])}",
            expected=f"{tuple(output)}, as the network's outputs have",
            fix="reshape it, or change the last layer",
        )


LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "squared_error": SquaredError,
}


def loss_of(given: str | Loss) -> Loss:
    """Returns a loss by its name, or a given Loss.

    Raises:
        PlanError: the name is unknown.
    """
    if isinstance(given, Loss):
        return given
    if not isinstance(given, str) or given not in LOSSES:
        shown = repr(given) if isinstance(given, str) else type_name(given)
        raise PlanError(f"loss={shown}", expected="one of " + ", ".join(LOSSES) + ", or a Loss")
    return LOSSES[given]()
