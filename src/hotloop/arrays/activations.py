"""Activations: y = f(x) for each number x, so that backward is dX = f'(X) ∘ dY; all shapes are (n, ...).

Each docstring gives f and f', with y where f' can use the output: the derivative of tanh is 1 - y².
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from hotloop.arrays.backend import Array, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch


def sigmoid(x: Array) -> Array:
    """Returns 1 / (1 + e⁻ˣ), by a tanh, which doesn't overflow."""
    return 0.5 * (1 + array_namespace(x).tanh(0.5 * x))


class Activation(Layer):
    """A function of each number; a subclass defines f as `value` and f' as `slope`."""

    def value(self, x: Array) -> Array:
        """Returns f(x)."""
        raise NotImplementedError

    def slope(self, x: Array, y: Array) -> Array:
        """Returns f'(x), for y = f(x)."""
        raise NotImplementedError

    def forward(self, x: Array, training: bool = False) -> Array:
        self._x, self._y = x, self.value(x)
        return self._y

    def backward(self, dy: Array) -> Array:
        return dy * self.slope(self._x, self._y)


class Step(Activation):
    """f = 1 where x > 0, else 0; f' = 0, so that no layer before can learn (McCulloch, Pitts, 1943)."""

    def value(self, x: Array) -> Array:
        return array_namespace(x).astype(x > 0, x.dtype)

    def slope(self, x: Array, y: Array) -> Array:
        return 0.0 * y


class Identity(Activation):
    """f = x; f' = 1."""

    def value(self, x: Array) -> Array:
        return x

    def slope(self, x: Array, y: Array) -> Array:
        return array_namespace(x).ones_like(x)


class Sigmoid(Activation):
    """f = 1 / (1 + e⁻ˣ); f' = y (1 - y)."""

    def value(self, x: Array) -> Array:
        return sigmoid(x)

    def slope(self, x: Array, y: Array) -> Array:
        return y * (1 - y)


class Tanh(Activation):
    """f = tanh x; f' = 1 - y²."""

    def value(self, x: Array) -> Array:
        return array_namespace(x).tanh(x)

    def slope(self, x: Array, y: Array) -> Array:
        return 1 - y * y


class ReLU(Activation):
    """f = max(x, 0); f' = 1 where x > 0, else 0 (Nair, Hinton: Rectified Linear Units, ICML 2010)."""

    def value(self, x: Array) -> Array:
        xp = array_namespace(x)
        return xp.maximum(x, xp.zeros_like(x))

    def slope(self, x: Array, y: Array) -> Array:
        return array_namespace(x).astype(x > 0, x.dtype)


class LeakyReLU(Activation):
    """f = x where x > 0, else s·x; f' = 1 or s (Maas, Hannun, Ng: Rectifier Nonlinearities, ICML 2013)."""

    def __init__(self, s: float = 0.01) -> None:
        super().__init__()
        self.s = s

    def value(self, x: Array) -> Array:
        return array_namespace(x).where(x > 0, x, self.s * x)

    def slope(self, x: Array, y: Array) -> Array:
        above = array_namespace(x).astype(x > 0, x.dtype)
        return above + self.s * (1 - above)


class ELU(Activation):
    """f = x where x > 0, else a (eˣ - 1); f' = 1 or y + a (Clevert, Unterthiner, Hochreiter, ICLR 2016, section 3)."""

    def __init__(self, a: float = 1.0) -> None:
        super().__init__()
        self.a = a

    def value(self, x: Array) -> Array:
        xp = array_namespace(x)
        return xp.where(x > 0, x, self.a * xp.expm1(xp.minimum(x, xp.zeros_like(x))))

    def slope(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        return xp.where(x > 0, xp.ones_like(x), y + self.a)


class Softplus(Activation):
    """f = ln(1 + eˣ); f' = 1 / (1 + e⁻ˣ) (Dugas et al.: Second-Order Functional Knowledge, NIPS 2000).

    torch computes f = x above 20, with an error of up to 2e-9.
    """

    def value(self, x: Array) -> Array:
        xp = array_namespace(x)
        return xp.logaddexp(x, xp.zeros_like(x))

    def slope(self, x: Array, y: Array) -> Array:
        return sigmoid(x)


class SiLU(Activation):
    """f = x σ, σ = 1 / (1 + e⁻ˣ); f' = σ (1 + x (1 - σ)) (Elfwing, Uchibe, Doya: Sigmoid-Weighted Linear Units, 2018)."""

    def value(self, x: Array) -> Array:
        return x * sigmoid(x)

    def slope(self, x: Array, y: Array) -> Array:
        share = sigmoid(x)
        return share * (1 + x * (1 - share))


class GELU(Activation):
    """f = x Φ(x); f' = Φ(x) + x φ(x), with Φ and φ of the normal distribution (Hendrycks, Gimpel, 2016, section 2).

    Φ(x) = (1 + erf(x/√2)) / 2 and φ(x) = e^(-x²/2) / √(2π).
    """

    def value(self, x: Array) -> Array:
        return x * _normal_cdf(x)

    def slope(self, x: Array, y: Array) -> Array:
        density = array_namespace(x).exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return _normal_cdf(x) + x * density


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def erf(x: Array) -> Array:
    """Returns the error function, which the array API standard lacks, with an error below 1e-14.

    erf(|x|) = 1 - e^(-x²) w(|x|), where the smooth w is a polynomial of t = (|x| - 2) / (|x| + 2) in [-1, 1]: a Chebyshev
    series, summed by Clenshaw's recurrence.
    """
    xp = array_namespace(x)
    size = xp.abs(x)
    t = (size - 2) / (size + 2)
    later, latest = xp.zeros_like(t), xp.zeros_like(t)
    first, *others = _coefficients()
    for coefficient in reversed(others):
        latest, later = coefficient + 2 * t * latest - later, latest
    return xp.sign(x) * (1 - xp.exp(-size * size) * (first + t * latest - later))


@cache
def _coefficients() -> list[float]:
    """Returns the Chebyshev series in t of w(x) = e^(x²) (1 - erf x)."""
    from scipy.special import erfcx  # a slow import that only GELU needs

    def w(t: Any) -> Any:
        return erfcx(2 * (1 + t) / (1 - t))

    return [float(value) for value in np.polynomial.chebyshev.chebinterpolate(w, 32)]


class Softmax(Layer):
    """Turns numbers along one dimension into probabilities: positive, with the sum 1.

        forward   Y  = eˣ / Σ eˣ                   X, Y (n, ..., c, ...), sums over c
        backward  dX = Y ∘ (dY - Σ (dY ∘ Y))       since each y depends on all x

    The loss `CrossEntropy` contains a softmax, so its networks must not end in another.

    Args:
        axis: the dimension of c, counted with the batch's.
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def shape(self, shape: Shape) -> Shape:
        if not -len(shape) <= self.axis <= len(shape) or not self.axis:
            raise ShapeMismatch(f"a dimension {self.axis} besides the batch dimension")
        return shape

    def forward(self, x: Array, training: bool = False) -> Array:
        self._y = softmax(x, self.axis)
        return self._y

    def backward(self, dy: Array) -> Array:
        y = self._y
        return y * (dy - array_namespace(y).sum(dy * y, axis=self.axis, keepdims=True))


def softmax(x: Array, axis: int) -> Array:
    """Returns eˣ / Σ eˣ along one dimension; subtracts the largest x first, against overflow."""
    xp = array_namespace(x)
    powers = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return powers / xp.sum(powers, axis=axis, keepdims=True)
