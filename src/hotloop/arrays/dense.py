"""Dense layers and normalisations: dense, flatten, dropout, embedding, batch and layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable

from array_api_compat import array_namespace

from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch, check_integers
from hotloop.errors import DataError, TaskError


class Dense(Layer):
    """A fully connected layer: each output is a weighted sum of all inputs.

        forward   Y  = X Wᵀ + b     X (n, i)   W (o, i)   b (o)   Y (n, o)
        backward  dW = dYᵀ X        (o, n) (n, i) -> (o, i)
                  db = Σ_n dY       (o)
                  dX = dY W         (n, o) (o, i) -> (n, i)

    Weights start uniformly in ±1/√i, as torch's do (LeCun et al.: Efficient BackProp, 1998, section 4.6, for the √i).

    Args:
        units: o.
        bias: whether the layer has b.
        each: False: a sample of any shape is one vector of i numbers. True: the layer acts on the last dimension, as
            torch's Linear; n then counts all vectors.
    """

    def __init__(self, units: int, bias: bool = True, each: bool = False) -> None:
        super().__init__()
        check_integers("Dense", 1, units=units)
        self.units, self.bias, self.each = units, bias, each

    def shape(self, shape: Shape) -> Shape:
        inputs = self._inputs(shape)
        weight = self.weights.get("weight")
        if not shape or (weight is not None and weight.shape[1] != inputs):
            raise ShapeMismatch(
                "numbers along a dimension" if weight is None else f"{weight.shape[1]} numbers for each vector"
            )
        return (*shape[:-1], self.units) if self.each else (self.units,)

    def _inputs(self, shape: Shape) -> int:
        return shape[-1] if self.each and shape else math.prod(shape)

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        inputs = self._inputs(shape)
        self.weights = {"weight": make.uniform((self.units, inputs), inputs**-0.5)}
        if self.bias:
            self.weights["bias"] = make.uniform((self.units,), inputs**-0.5)

    def forward(self, x: Array, training: bool = False) -> Array:
        xp, weight = array_namespace(x), self.weights["weight"]
        self._shape = x.shape
        self._x = xp.reshape(x, (-1, weight.shape[1]) if self.each else (x.shape[0], -1))
        y = self._x @ weight.T
        if self.bias:
            y = y + self.weights["bias"]
        return xp.reshape(y, (*x.shape[:-1], self.units)) if self.each else y

    def backward(self, dy: Array) -> Array:
        xp = array_namespace(dy)
        dy = xp.reshape(dy, (-1, self.units))
        self.gradients["weight"] = dy.T @ self._x
        if self.bias:
            self.gradients["bias"] = xp.sum(dy, axis=0)
        return xp.reshape(dy @ self.weights["weight"], self._shape)

    def __repr__(self) -> str:
        return f"Dense({self.units})"


class Flatten(Layer):
    """Each sample as one vector.

    forward   Y (n, a·b·c)   is X (n, a, b, c), in C order
    backward  dX (n, a, b, c) is dY (n, a·b·c)
    """

    def shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def forward(self, x: Array, training: bool = False) -> Array:
        self._shape = x.shape
        return array_namespace(x).reshape(x, (x.shape[0], -1))

    def backward(self, dy: Array) -> Array:
        return array_namespace(dy).reshape(dy, self._shape)


class Dropout(Layer):
    """Zeroes each number with probability p in training (Srivastava et al.: Dropout, JMLR 2014, section 4).

        forward   Y  = M ∘ X / (1 - p)     M (n, ...) of random zeros and ones; ∘ is element by element
        backward  dX = M ∘ dY / (1 - p)

    The division by 1 - p keeps the mean, so that Y = X outside of training.

    Attributes:
        draw: `draw(shape, share)` returns M, with ones of probability `share`.
    """

    draw: Callable[[Shape, float], Array]

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not isinstance(p, int | float) or not 0 <= p <= 1:
            raise TaskError(f"p={p!r} of Dropout", expected="a probability from 0 to 1")
        self.p = p

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        self.draw = make.bernoulli

    def forward(self, x: Array, training: bool = False) -> Array:
        if not training or self.p == 0:
            self._scale: Array = 1.0
            return x
        self._scale = self.draw(x.shape, 1 - self.p) / (1 - self.p) if self.p < 1 else 0.0 * x
        return x * self._scale

    def backward(self, dy: Array) -> Array:
        return dy * self._scale

    def __repr__(self) -> str:
        return f"Dropout({self.p})"


class Embedding(Layer):
    """A vector for each whole number, such as a word's: a dense layer over one-hot vectors.

        forward   Y  = E W        E (n·t, v), with a 1 in each row at the number's place   W (v, d)   Y (n, t, d)
                                  Y consists of rows of W, without a product
        backward  dW = Eᵀ dY      (v, n·t) (n·t, d) -> (v, d): sums of dY's rows by number
                  no dX: a whole number has no derivative, so the layer must be the first

    Args:
        numbers: v; the numbers are 0 to v - 1.
        size: d.
    """

    def __init__(self, numbers: int, size: int) -> None:
        super().__init__()
        check_integers("Embedding", 1, numbers=numbers, size=size)
        self.numbers, self.size = numbers, size

    def shape(self, shape: Shape) -> Shape:
        return (*shape, self.size)

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        self.weights = {"weight": make.normal((self.numbers, self.size))}

    def check(self, x: Array, name: str) -> None:
        """Checks that all numbers of the data `name` have a vector.

        Raises:
            DataError: a number is below 0, or too large.
        """
        xp = array_namespace(x)
        low, high = int(xp.min(x)), int(xp.max(x))
        if low < 0 or high >= self.numbers:
            raise DataError(
                f"{name} holds {low if low < 0 else high}",
                expected=f"numbers from 0 to {self.numbers - 1}, as {self!r} has",
            )

    def forward(self, x: Array, training: bool = False) -> Array:
        xp = array_namespace(x)
        self._x = xp.reshape(x, (-1,))
        rows = xp.take(self.weights["weight"], self._x, axis=0)
        return xp.reshape(rows, (*x.shape, self.size))

    def backward(self, dy: Array) -> Array:
        xp = array_namespace(dy)
        dy = xp.reshape(dy, (-1, self.size))
        numbers = xp.arange(self.numbers, dtype=self._x.dtype, device=self._x.device)
        hot = xp.astype(self._x[:, None] == numbers[None, :], dy.dtype)
        self.gradients["weight"] = hot.T @ dy
        return None

    def __repr__(self) -> str:
        return f"Embedding({self.numbers}, {self.size})"


class BatchNorm(Layer):
    """Gives each channel mean 0 and variance 1 over the batch (Ioffe, Szegedy: Batch Normalization, 2015, algorithm 1).

        forward   X̂  = (X - μ) / σ                    X (n, c) or (n, c, ...)   μ, σ (c), over all but the channels
                  Y  = γ ∘ X̂ + β                      γ, β (c)
        backward  dγ = Σ dY ∘ X̂,  dβ = Σ dY           (c), over all but the channels
                  dX = γ/σ ∘ (dY - mean(dY) - X̂ ∘ mean(dY ∘ X̂)),  since μ and σ depend on X too

    σ² is the variance plus `eps`. Outside of training, μ and σ are running means over past batches, with the weight
    `momentum` for the newest and the unbiased variance, as in torch.

    Args:
        affine: whether the layer has γ (`weight`) and β (`bias`).
    """

    def __init__(self, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.momentum, self.eps, self.affine = momentum, eps, affine

    def shape(self, shape: Shape) -> Shape:
        known = self.buffers.get("running_mean")
        if not shape or (known is not None and known.shape[0] != shape[0]):
            raise ShapeMismatch("channels, (c) or (c, ...)" if known is None else f"{known.shape[0]} channels")
        return shape

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        channels = shape[:1]
        if self.affine:
            self.weights = {"weight": make.full(channels, 1.0), "bias": make.full(channels, 0.0)}
        self.buffers = {
            "running_mean": make.full(channels, 0.0),
            "running_var": make.full(channels, 1.0),
            "num_batches_tracked": make.count(),
        }

    def forward(self, x: Array, training: bool = False) -> Array:
        xp = array_namespace(x)
        self._axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        if training:
            mean = xp.mean(x, axis=self._axes, keepdims=True)
            centred = x - mean
            variance = xp.mean(centred * centred, axis=self._axes, keepdims=True)
            self._update_running(mean, variance, x)
        else:
            centred = x - self._wide(self.buffers["running_mean"], x)
            variance = self._wide(self.buffers["running_var"], x)
        self._sigma = xp.sqrt(variance + self.eps)
        self._normal = centred / self._sigma
        if not self.affine:
            return self._normal
        return self._wide(self.weights["weight"], x) * self._normal + self._wide(self.weights["bias"], x)

    def _update_running(self, mean: Array, variance: Array, x: Array) -> None:
        count = math.prod(x.shape) // x.shape[1]
        if count < 2:
            raise DataError(
                "a batch normalisation got a single number for each channel, and a single number has no variance",
                expected="two or more",
                fix="choose a batch size whose last batch has 2 or more samples",
            )
        unbiased = variance * (count / (count - 1))
        for name, value in (("running_mean", mean), ("running_var", unbiased)):
            running = self.buffers[name]
            running += self.momentum * (array_namespace(value).reshape(value, (-1,)) - running)
        counted = self.buffers["num_batches_tracked"]
        counted += 1

    def backward(self, dy: Array) -> Array:
        xp, normal = array_namespace(dy), self._normal
        if self.affine:
            self.gradients["weight"] = xp.sum(dy * normal, axis=self._axes)
            self.gradients["bias"] = xp.sum(dy, axis=self._axes)
            dy = self._wide(self.weights["weight"], dy) * dy
        mean = xp.mean(dy, axis=self._axes, keepdims=True)
        along = xp.mean(dy * normal, axis=self._axes, keepdims=True)
        return (dy - mean - normal * along) / self._sigma

    def _wide(self, channels: Array, x: Array) -> Array:
        """Returns (c) as (1, c, 1, ...), to broadcast against x."""
        return array_namespace(channels).reshape(channels, (1, -1, *(1,) * (x.ndim - 2)))


class LayerNorm(Layer):
    """Gives each sample, or each vector of it, mean 0 and variance 1 (Ba, Kiros, Hinton: Layer Normalization, 2016).

        forward   X̂  = (X - μ) / σ                    X (n, ..., d)   μ, σ (n, ..., 1), over d
                  Y  = γ ∘ X̂ + β                      γ, β (d)
        backward  dγ = Σ dY ∘ X̂,  dβ = Σ dY           (d), over all but d
                  dX = 1/σ ∘ (dX̂ - mean(dX̂) - X̂ ∘ mean(dX̂ ∘ X̂)),  dX̂ = γ ∘ dY, means over d

    Args:
        dims: number of the last dimensions that d stands for.
        affine: whether the layer has γ (`weight`) and β (`bias`).
        bias: whether the layer has β.

    Attributes:
        last: d, once known.
    """

    def __init__(self, dims: int = 1, eps: float = 1e-5, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        check_integers("LayerNorm", 1, dims=dims)
        self.dims, self.eps, self.affine, self.bias = dims, eps, affine, bias
        self.last: Shape | None = None

    def shape(self, shape: Shape) -> Shape:
        if len(shape) < self.dims:
            raise ShapeMismatch(f"samples of {self.dims} or more dimensions")
        if self.last is not None and tuple(shape[-self.dims :]) != self.last:
            raise ShapeMismatch(f"samples that end in {self.last}")
        return shape

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        self.last = last = tuple(shape[-self.dims :])
        if self.affine:
            self.weights = {"weight": make.full(last, 1.0)} | ({"bias": make.full(last, 0.0)} if self.bias else {})

    def forward(self, x: Array, training: bool = False) -> Array:
        xp = array_namespace(x)
        self._axes = tuple(range(x.ndim - self.dims, x.ndim))
        centred = x - xp.mean(x, axis=self._axes, keepdims=True)
        self._sigma = xp.sqrt(xp.mean(centred * centred, axis=self._axes, keepdims=True) + self.eps)
        self._normal = y = centred / self._sigma
        if "weight" in self.weights:
            y = self.weights["weight"] * y
        return y + self.weights["bias"] if "bias" in self.weights else y

    def backward(self, dy: Array) -> Array:
        xp, normal = array_namespace(dy), self._normal
        others = tuple(range(dy.ndim - self.dims))
        if "bias" in self.weights:
            self.gradients["bias"] = xp.sum(dy, axis=others)
        if "weight" in self.weights:
            self.gradients["weight"] = xp.sum(dy * normal, axis=others)
            dy = self.weights["weight"] * dy
        mean = xp.mean(dy, axis=self._axes, keepdims=True)
        along = xp.mean(dy * normal, axis=self._axes, keepdims=True)
        return (dy - mean - normal * along) / self._sigma
