"""Optimizers. W is a weight, G its gradient; all operations are element by element.

The names of the arrays and the results are those of torch's optimizers. With a `weight_decay` of λ, G is G + λ W in
all optimizers but AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from array_api_compat import array_namespace

from hotloop.arrays.backend import Array
from hotloop.errors import PlanError, type_name

Memory = dict[str, Array]


class Optimizer:
    """The update of a weight.

    Attributes:
        remembers: names of the arrays of the weight's shape that persist from step to step.
    """

    remembers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lr: float, weight_decay: float = 0.0) -> None:
        self.lr, self.weight_decay = lr, weight_decay
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or not value >= 0 or (name.startswith("beta") and value >= 1):
                expected = "a number from 0 to below 1" if name.startswith("beta") else "a number of 0 or more"
                raise PlanError(f"{name}={value!r} of {type(self).__name__}", expected=expected)

    def memory(self, w: Array) -> Memory:
        """Returns the arrays of a weight before the first step: zeros."""
        return {name: array_namespace(w).zeros_like(w) for name in self.remembers}

    def update(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        """Changes a weight and its arrays in place; `step` counts from 1."""
        self._move(w, g + self.weight_decay * w if self.weight_decay else g, memory, step)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        raise NotImplementedError


class SGD(Optimizer):
    """Gradient descent (Robbins, Monro: A Stochastic Approximation Method, 1951).

    W ← W - η G
    """

    def __init__(self, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(lr, weight_decay)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        w -= self.lr * g


class Momentum(Optimizer):
    """The heavy ball (Polyak: Some methods of speeding up the convergence of iteration methods, 1964).

    B ← μ B + G
    W ← W - η B
    """

    remembers = ("momentum_buffer",)

    def __init__(self, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        super().__init__(lr, weight_decay)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        b = memory["momentum_buffer"]
        b *= self.momentum
        b += g
        w -= self.lr * self._direction(g, b)

    def _direction(self, g: Array, b: Array) -> Array:
        return b


class Nesterov(Momentum):
    """Momentum with a gradient ahead (Nesterov 1983; as in Sutskever et al.: On the importance of initialization and
    momentum in deep learning, ICML 2013).

        B ← μ B + G
        W ← W - η (G + μ B)
    """

    def _direction(self, g: Array, b: Array) -> Array:
        return g + self.momentum * b


class AdaGrad(Optimizer):
    """A rate for each weight that falls with its past gradients (Duchi, Hazan, Singer: Adaptive Subgradient Methods,
    JMLR 2011).

        S ← S + G²
        W ← W - η G / (√S + ε)
    """

    remembers = ("sum",)

    def __init__(self, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0) -> None:
        self.eps = eps
        super().__init__(lr, weight_decay)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        s = memory["sum"]
        s += g * g
        w -= self.lr * g / (array_namespace(w).sqrt(s) + self.eps)


class RMSProp(Optimizer):
    """AdaGrad with a running mean (Tieleman, Hinton: Neural Networks for Machine Learning, lecture 6.5, 2012).

    S ← α S + (1 - α) G²
    W ← W - η G / (√S + ε)
    """

    remembers = ("square_avg",)

    def __init__(self, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self.alpha, self.eps = alpha, eps
        super().__init__(lr, weight_decay)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        s = memory["square_avg"]
        _update_mean(s, g * g, self.alpha)
        w -= self.lr * g / (array_namespace(w).sqrt(s) + self.eps)


class AdaDelta(Optimizer):
    """Steps in the units of the weights (Zeiler: ADADELTA, 2012, algorithm 1).

    S ← ρ S + (1 - ρ) G²
    D = G √(A + ε) / √(S + ε)
    A ← ρ A + (1 - ρ) D²
    W ← W - η D
    """

    remembers = ("square_avg", "acc_delta")

    def __init__(self, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0) -> None:
        self.rho, self.eps = rho, eps
        super().__init__(lr, weight_decay)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        xp, s, a = array_namespace(w), memory["square_avg"], memory["acc_delta"]
        _update_mean(s, g * g, self.rho)
        d = g * xp.sqrt(a + self.eps) / xp.sqrt(s + self.eps)
        _update_mean(a, d * d, self.rho)
        w -= self.lr * d


class Adam(Optimizer):
    """Running means of G and G², corrected for their start at zero (Kingma, Ba: Adam, ICLR 2015, algorithm 1).

    M ← β₁ M + (1 - β₁) G
    V ← β₂ V + (1 - β₂) G²
    W ← W - η (M / (1 - β₁ᵗ)) / (√(V / (1 - β₂ᵗ)) + ε)      t counts the steps
    """

    remembers = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        super().__init__(lr, weight_decay)

    def _move(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        m, v = memory["exp_avg"], memory["exp_avg_sq"]
        _update_mean(m, g, self.beta1)
        _update_mean(v, g * g, self.beta2)
        spread = array_namespace(w).sqrt(v) / (1 - self.beta2**step) ** 0.5 + self.eps
        w -= self.lr / (1 - self.beta1**step) * m / spread


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019,
    algorithm 2).

        W ← W - η λ W, then Adam with G alone
    """

    def __init__(
        self,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(lr, beta1, beta2, eps, weight_decay)

    def update(self, w: Array, g: Array, memory: Memory, step: int) -> None:
        w *= 1 - self.lr * self.weight_decay
        self._move(w, g, memory, step)


def _update_mean(mean: Array, value: Array, share: float) -> None:
    """mean ← share · mean + (1 - share) · value."""
    mean *= share
    mean += (1 - share) * value


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "nesterov": Nesterov,
    "adagrad": AdaGrad,
    "rmsprop": RMSProp,
    "adadelta": AdaDelta,
    "adam": Adam,
    "adamw": AdamW,
}


def optimizer_of(given: Any) -> Optimizer:
    """Returns an optimizer by its name, with its default rate, or a given Optimizer.

    Raises:
        PlanError: the name is unknown.
    """
    if isinstance(given, Optimizer):
        return given
    if not isinstance(given, str) or given not in OPTIMIZERS:
        shown = repr(given) if isinstance(given, str) else type_name(given)
        raise PlanError(f"optimizer={shown}", expected="one of " + ", ".join(OPTIMIZERS) + ", or an Optimizer")
    return OPTIMIZERS[given]()
