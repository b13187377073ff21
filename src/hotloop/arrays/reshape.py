"""Layers that reshape a sample, take means over its dimensions, or select a step of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from array_api_compat import array_namespace

from hotloop.arrays.backend import Array, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch
from hotloop.errors import TaskError


class Reshape(Layer):
    """Changes the shape of each sample; the numbers keep their order.

        forward   Y (n, sizes)    is X (n, ...), in C order
        backward  dX (n, ...)     is dY

    Args:
        sizes: shape of a sample; one size may be -1, which stands for the rest.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
        if not all(isinstance(one, int) and (one > 0 or one == -1) for one in self.sizes) or self.sizes.count(-1) > 1:
            raise TaskError(
                f"sizes={sizes!r} of Reshape", expected="whole numbers of 1 or more, and -1 for one of them at most"
            )

    def shape(self, shape: Shape) -> Shape:
        numbers, known = math.prod(shape), math.prod(size for size in self.sizes if size != -1)
        if numbers % known or (-1 not in self.sizes and numbers != known):
            raise ShapeMismatch(
                f"{'a multiple of ' if -1 in self.sizes else ''}{known} numbers, to make {self.sizes} of"
            )
        return tuple(numbers // known if size == -1 else size for size in self.sizes)

    def forward(self, x: Array, training: bool = False) -> Array:
        self._shape = x.shape
        return array_namespace(x).reshape(x, (x.shape[0], *self.shape(x.shape[1:])))

    def backward(self, dy: Array) -> Array:
        return array_namespace(dy).reshape(dy, self._shape)

    def __repr__(self) -> str:
        return f"Reshape({self.sizes})"


class Mean(Layer):
    """The mean over some dimensions, such as over the words of a sentence or the pixels of an image.

        forward   Y  = Σ X / m     X (n, ...), Y without those dimensions; m numbers in each sum
        backward  dX = dY / m      the same share for each

    Args:
        axes: dimensions of X without 0, the samples; -1 is the last.
    """

    def __init__(self, axes: int | Sequence[int]) -> None:
        super().__init__()
        self.axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
        if not self.axes or not all(isinstance(axis, int) and axis for axis in self.axes):
            raise TaskError(
                f"axes={axes!r} of Mean", expected="numbers of dimensions other than 0, which is that of the samples"
            )

    def shape(self, shape: Shape) -> Shape:
        reduced = self._reduced_dims(len(shape) + 1)
        return tuple(size for axis, size in enumerate(shape, start=1) if axis not in reduced)

    def _reduced_dims(self, dims: int) -> tuple[int, ...]:
        reduced = tuple(axis % dims for axis in self.axes if -dims <= axis < dims)
        if len(set(reduced) - {0}) < len(self.axes):
            raise ShapeMismatch(f"samples that have the dimensions {self.axes}, where 0 is that of the samples")
        return reduced

    def forward(self, x: Array, training: bool = False) -> Array:
        self._shape, self._over = x.shape, self._reduced_dims(x.ndim)
        return array_namespace(x).mean(x, axis=self._over)

    def backward(self, dy: Array) -> Array:
        xp, sizes = array_namespace(dy), [1 if axis in self._over else size for axis, size in enumerate(self._shape)]
        averaged = math.prod(self._shape[axis] for axis in self._over)
        return xp.broadcast_to(xp.reshape(dy / averaged, tuple(sizes)), self._shape)

    def __repr__(self) -> str:
        return f"Mean({self.axes})"


class At(Layer):
    """One step of a sequence, such as the last.

        forward   Y  = X_t        X (n, t, ...)   Y (n, ...)
        backward  dX = dY at t, and 0 elsewhere

    Args:
        step: t, from 0; -1 is the last.
    """

    def __init__(self, step: int = -1) -> None:
        super().__init__()
        if not isinstance(step, int):
            raise TaskError(f"step={step!r} of At", expected="a whole number, such as -1 for the last step")
        self.step = step

    def shape(self, shape: Shape) -> Shape:
        if not shape or not -shape[0] <= self.step < shape[0]:
            raise ShapeMismatch(f"sequences that have a step {self.step}")
        return shape[1:]

    def forward(self, x: Array, training: bool = False) -> Array:
        self._x = x
        return x[:, self.step, ...]

    def backward(self, dy: Array) -> Array:
        dx = array_namespace(dy).zeros_like(self._x)
        dx[:, self.step, ...] = dy
        return dx

    def __repr__(self) -> str:
        return f"At({self.step})"
