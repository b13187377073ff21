"""Convolution and pooling, both over windows of an image.

`unfold` (im2col) copies the pixels of each window, and its transpose `fold` (col2im) sums them up by pixel. As matrices
on the pixels of an image they are U and Uᵀ. Both loop over the k_h·k_w places of a window and move all windows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from array_api_compat import array_namespace

from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch, check_integers
from hotloop.errors import TaskError

Size = int | tuple[int, ...]
"""One number for all dimensions, or one for each."""


def _by_dimension(name: str, value: Any, least: int, dims: int) -> tuple[int, ...]:
    """Returns a number for each dimension; one number stands for all.

    Raises:
        TaskError: the value is neither one whole number nor one for each dimension.
    """
    each = tuple(value) if isinstance(value, tuple | list) else (value,) * dims
    if len(each) != dims:
        raise TaskError(f"{name}={value!r} of a window", expected="one number, or two: rows and columns")
    for one in each:
        check_integers("a window", least, **{name: one})
    return each


class Window:
    """A window of (k_h, k_w) places over an image (h, w), with (oh, ow) positions; in other dimensions the same.

    Args:
        size, stride, pad, dilation: rows and columns; `pad` is added on each side, and with a dilation of d the places
            of the window are d pixels apart.
        dims: dimensions of an image.
    """

    def __init__(self, size: Size, stride: Size, pad: Size = 0, dilation: Size = 1, dims: int = 2) -> None:
        self.size = _by_dimension("size", size, 1, dims)
        self.stride = _by_dimension("stride", stride, 1, dims)
        self.pad = _by_dimension("pad", pad, 0, dims)
        self.dilation = _by_dimension("dilation", dilation, 1, dims)

    @property
    def places(self) -> int:
        return math.prod(self.size)

    def positions(self, image: Shape) -> Shape:
        """Returns (oh, ow); zero or less if the window doesn't fit."""
        settings = zip(image, self.size, self.stride, self.pad, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in settings)

    def shape(self, shape: Shape, channels: int) -> Shape:
        """Returns the output shape of a layer with `channels` channels and a number for each position."""
        if len(shape) != 1 + len(self.size) or min(self.positions(shape[1:])) < 1:
            raise ShapeMismatch(f"images (channels, height, width) at least as large as a window of {self._extent()}")
        return (channels, *self.positions(shape[1:]))

    def _extent(self) -> str:
        reach = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(self.dilation, self.size, self.pad, strict=True)]
        return " x ".join(str(max(1, number)) for number in reach)

    def unfold(self, x: Array, fill: float = 0.0) -> Array:
        """(n, c, h, w) -> (n, c, k_h·k_w, oh, ow): the pixels of each window; `fill` outside of the image."""
        positions = self.positions(x.shape[2:])
        x = self._padded(x, fill)
        shape = (*x.shape[:2], self.places, *positions)
        windows = array_namespace(x).empty(shape, dtype=x.dtype, device=x.device)
        for place, pixels in enumerate(self._pixels(positions)):
            windows[:, :, place, ...] = x[:, :, *pixels]
        return windows

    def fold(self, windows: Array, image: Shape) -> Array:
        """(n, c, k_h·k_w, oh, ow) -> (n, c, h, w), the transpose of `unfold`: sums over the windows at each pixel."""
        shape = (*windows.shape[:2], *self._padded_size(image))
        x = array_namespace(windows).zeros(shape, dtype=windows.dtype, device=windows.device)
        for place, pixels in enumerate(self._pixels(windows.shape[3:])):
            x[:, :, *pixels] += windows[:, :, place, ...]
        return x[:, :, *self._inside(image)]

    def columns(self, x: Array, groups: int = 1) -> Array:
        """Returns P of an image: (n, c, h, w) -> (n, g, c/g·k_h·k_w, oh·ow)."""
        windows = self.unfold(x)
        return array_namespace(x).reshape(windows, (x.shape[0], groups, -1, math.prod(windows.shape[3:])))

    def fold_columns(self, columns: Array, image: Shape) -> Array:
        """Returns Uᵀ of columns such as P: (n, g, c/g·k_h·k_w, oh·ow) -> (n, c, h, w)."""
        shape = (columns.shape[0], -1, self.places, *self.positions(image))
        return self.fold(array_namespace(columns).reshape(columns, shape), image)

    def _pixels(self, positions: Shape) -> Iterator[tuple[slice, ...]]:
        """Yields for each place of the window its pixels at all positions."""
        settings = zip(positions, self.size, self.stride, self.dilation, strict=True)
        return product(*([slice(i * d, i * d + s * (o - 1) + 1, s) for i in range(k)] for o, k, s, d in settings))

    def _inside(self, image: Shape) -> tuple[slice, ...]:
        return tuple(slice(pad, pad + size) for pad, size in zip(self.pad, image, strict=True))

    def _padded_size(self, image: Shape) -> Shape:
        return tuple(size + 2 * pad for size, pad in zip(image, self.pad, strict=True))

    def _padded(self, x: Array, fill: float) -> Array:
        if not any(self.pad):
            return x
        image = x.shape[2:]
        shape = (*x.shape[:2], *self._padded_size(image))
        wide = array_namespace(x).full(shape, fill, dtype=x.dtype, device=x.device)
        wide[:, :, *self._inside(image)] = x
        return wide

    def __repr__(self) -> str:
        return "x".join(map(str, self.size))


class Conv(Layer):
    """A convolution, as one product of matrices for each sample (Chellapilla et al.: High Performance Convolutional
    Neural Networks for Document Processing, 2006).

        forward   P  = U X              unfold: (c, h, w) -> (c·k_h·k_w, oh·ow), a column for each position
                  Y  = W P + b          W (o, c·k_h·k_w)   b (o, 1)   Y (o, oh·ow), as (o, oh, ow)
        backward  dW = Σ_n dY Pᵀ        (o, oh·ow) (oh·ow, c·k_h·k_w)
                  db = Σ_n Σ dY         (o), over the positions
                  dX = Uᵀ (Wᵀ dY)       fold: (c·k_h·k_w, oh·ow) -> (c, h, w)

    With g groups, the first o/g outputs use the first c/g channels, and so on: W is (g, o/g, c/g·k_h·k_w), P is
    (g, c/g·k_h·k_w, oh·ow), and each product becomes g products.

    Weights start uniformly in ±1/√(c/g·k_h·k_w), as torch's do.

    Args:
        channels: o.
        size: k_h and k_w; one number, or two.
        stride, pad, dilation: see `Window`.
        groups: g.
        bias: whether the layer has b.
    """

    def __init__(
        self,
        channels: int,
        size: Size,
        stride: Size = 1,
        pad: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_integers("Conv", 1, channels=channels, groups=groups)
        self.channels, self.groups, self.bias = channels, groups, bias
        self.window = Window(size, stride, pad, dilation)

    def shape(self, shape: Shape) -> Shape:
        after = self.window.shape(shape, self.channels)
        weight = self.weights.get("weight")
        if weight is not None and weight.shape[1] * self.groups != shape[0]:
            raise ShapeMismatch(f"images of {weight.shape[1] * self.groups} channels")
        if shape[0] % self.groups or self.channels % self.groups:
            raise ShapeMismatch(
                f"{self.groups} groups to divide both the channels that it gets and the {self.channels} it gives"
            )
        return after

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        inputs = shape[0] // self.groups
        bound = (inputs * self.window.places) ** -0.5
        self.weights = {"weight": make.uniform((self.channels, inputs, *self.window.size), bound)}
        if self.bias:
            self.weights["bias"] = make.uniform((self.channels,), bound)

    def forward(self, x: Array, training: bool = False) -> Array:
        xp = array_namespace(x)
        self._image = x.shape[2:]
        self._p = self.window.columns(x, self.groups)
        shape = (x.shape[0], self.channels, *self.window.positions(self._image))
        y = xp.reshape(self._weight_matrix() @ self._p, shape)
        return y + xp.reshape(self.weights["bias"], (-1, 1, 1)) if self.bias else y

    def backward(self, dy: Array) -> Array:
        xp, (n, _, oh, ow) = array_namespace(dy), dy.shape
        if self.bias:
            self.gradients["bias"] = xp.sum(dy, axis=(0, 2, 3))
        dy = xp.reshape(dy, (n, self.groups, -1, oh * ow))
        dw = xp.sum(dy @ xp.matrix_transpose(self._p), axis=0)
        self.gradients["weight"] = xp.reshape(dw, self.weights["weight"].shape)
        return self.window.fold_columns(xp.matrix_transpose(self._weight_matrix()) @ dy, self._image)

    def _weight_matrix(self) -> Array:
        """Returns W as (g, o/g, c/g·k_h·k_w)."""
        weight = self.weights["weight"]
        return array_namespace(weight).reshape(weight, (self.groups, self.channels // self.groups, -1))

    def __repr__(self) -> str:
        return f"Conv({self.channels}, {self.window!r})"


class _Pooling(Layer):
    def __init__(self, size: Size, stride: Size | None = None, pad: Size = 0, dilation: Size = 1) -> None:
        super().__init__()
        self.window = Window(size, size if stride is None else stride, pad, dilation)
        if any(2 * outside > inside for outside, inside in zip(self.window.pad, self.window.size, strict=True)):
            raise TaskError(
                f"pad={pad!r} around a pooling window of {self.window!r}",
                expected="at most half of the window, so that each window contains a pixel",
            )

    def shape(self, shape: Shape) -> Shape:
        return self.window.shape(shape, shape[0] if shape else 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.window!r})"


class MaxPool(_Pooling):
    """The largest number in each window, by channel.

        forward   P  = U X              unfold: (n, c, h, w) -> (n, c, k_h·k_w, oh, ow)
                  Y  = max P            over the places of the window: (n, c, oh, ow)
                  M  = (P = Y) / count  a mask of P's shape: 1 at the largest number, 0 elsewhere
        backward  dX = Uᵀ (M ∘ dY)      each derivative returns to the place of its number

    If several numbers of a window are the largest, each of these `count` numbers gets the same share; torch gives all
    to the first. Both are subgradients. Equal numbers come from zeros after a ReLU, whose derivative is 0 anyway, and
    from flat areas of an image. docs/how-to/arrays.md compares the mask with a list of places.

    Args:
        size, stride, pad, dilation: see `Window`; the stride is the size by default.
    """

    def forward(self, x: Array, training: bool = False) -> Array:
        xp = array_namespace(x)
        self._image = x.shape[2:]
        windows = self.window.unfold(x, fill=-math.inf)
        y = xp.max(windows, axis=2, keepdims=True)
        if training:
            largest = xp.astype(windows == y, x.dtype)
            self._mask = largest / xp.sum(largest, axis=2, keepdims=True)
        return y[:, :, 0, :, :]

    def backward(self, dy: Array) -> Array:
        return self.window.fold(self._mask * dy[:, :, None, :, :], self._image)


class AveragePool(_Pooling):
    """The mean of each window, by channel; the padding counts as zeros.

        forward   Y  = mean of U X      over the places of the window: (n, c, k_h·k_w, oh, ow) -> (n, c, oh, ow)
        backward  dX = Uᵀ (dY / (k_h·k_w)), the same share for each place

    Args:
        size, stride, pad: see `Window`; the stride is the size by default. Without a size the window is the image.
    """

    def __init__(self, size: Size | None = None, stride: Size | None = None, pad: Size = 0) -> None:
        super().__init__(1 if size is None else size, stride, pad)
        self.whole = size is None

    def shape(self, shape: Shape) -> Shape:
        self._fit(shape)
        return super().shape(shape)

    def _fit(self, shape: Any) -> None:
        if self.whole and len(shape) == 3:
            self.window = Window(shape[1:], shape[1:])

    def forward(self, x: Array, training: bool = False) -> Array:
        xp = array_namespace(x)
        self._fit(x.shape[1:])
        self._image = x.shape[2:]
        return xp.mean(self.window.unfold(x), axis=2)

    def backward(self, dy: Array) -> Array:
        xp, places = array_namespace(dy), self.window.places
        n, c, oh, ow = dy.shape
        share = xp.broadcast_to((dy / places)[:, :, None, :, :], (n, c, places, oh, ow))
        return self.window.fold(share, self._image)
