"""Recurrent layers: each step of a sequence passes a state to the next.

Backward runs from the last step and carries the state's derivative (Werbos: Backpropagation Through Time, 1990).
Sequences are (n, t, i): n samples of t steps of i numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from array_api_compat import array_namespace

from hotloop.arrays.activations import sigmoid
from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch, check_integers

States = tuple[Array, ...]
"""(h,) or (h, c), each (n, u)."""

Back = Callable[..., tuple[Array, States]]
"""Returns da_t of dh_t (and dc_t), and the derivative of the loss with respect to c_(t-1), if there is a c."""


class _Recurrent(Layer):
    """All recurrent layers: a step computes `gates` vectors of u numbers, and passes on `states`."""

    gates: int
    states = 1

    @staticmethod
    def step(a: Array, *cells: Array) -> tuple[States, Back]:
        """Returns the states of a_t, from c_(t-1) if there is a c, and the backward of the step."""
        raise NotImplementedError

    def __init__(self, units: int, last: bool = False) -> None:
        super().__init__()
        check_integers(type(self).__name__, 1, units=units)
        self.units, self.last = units, last

    def shape(self, shape: Shape) -> Shape:
        weight = self.weights.get("weight_ih")
        if len(shape) != 2 or (weight is not None and weight.shape[1] != shape[1]):
            raise ShapeMismatch(f"sequences (steps, {'numbers' if weight is None else weight.shape[1]})")
        return (self.units,) if self.last else (shape[0], self.units)

    def build(self, shape: Shape, make: ArrayFactory) -> None:
        rows, bound = self.gates * self.units, self.units**-0.5
        self.weights = {
            "weight_ih": make.uniform((rows, shape[1]), bound),
            "weight_hh": make.uniform((rows, self.units), bound),
            "bias_ih": make.uniform((rows,), bound),
            "bias_hh": make.uniform((rows,), bound),
        }

    def forward(self, x: Array, training: bool = False) -> Array:
        xp, self._x = array_namespace(x), x
        zeros = xp.zeros((x.shape[0], self.units), dtype=x.dtype, device=x.device)
        state, self._outputs = (zeros,) * self.states, [zeros]
        self._backs: list[Back] = []
        given = x @ self.weights["weight_ih"].T + (self.weights["bias_ih"] + self.weights["bias_hh"])
        for step in range(x.shape[1]):
            state, back = self.step(given[:, step, :] + state[0] @ self.weights["weight_hh"].T, *state[1:])
            self._outputs.append(state[0])
            self._backs.append(back)
        return state[0] if self.last else xp.stack(self._outputs[1:], axis=1)

    def backward(self, dy: Array) -> Array:
        xp, steps = array_namespace(dy), len(self._backs)
        grads: States = (0.0,) * self.states
        das = []
        for step in reversed(range(steps)):
            dh = dy[:, step, :] if not self.last else dy if step == steps - 1 else 0.0 * dy
            da, cells = self._backs[step](dh + grads[0], *grads[1:])
            grads = (da @ self.weights["weight_hh"], *cells)
            das.append(da)
        da = xp.stack(das[::-1], axis=1)
        flat, before = xp.reshape(da, (-1, da.shape[-1])), xp.stack(self._outputs[:-1], axis=1)
        bias = xp.sum(flat, axis=0)
        self.gradients = {
            "weight_ih": flat.T @ xp.reshape(self._x, (-1, self._x.shape[2])),
            "weight_hh": flat.T @ xp.reshape(before, (-1, self.units)),
            "bias_ih": bias,
            "bias_hh": xp.asarray(bias, copy=True),  # clipping changes each in place
        }
        return da @ self.weights["weight_ih"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.units})"


class RNN(_Recurrent):
    """The simple recurrent network (Elman: Finding Structure in Time, Cognitive Science 1990), with a tanh.

        forward   a_t = x_t W_ihᵀ + b_ih + h_(t-1) W_hhᵀ + b_hh     x_t (n, i)   h_t (n, u)   h_0 = 0
                  h_t = tanh a_t                                    W_ih (u, i)  W_hh (u, u)  b_ih, b_hh (u)
        backward  dh_t = dY_t + da_(t+1) W_hh                       from the loss, and from the next step
                  da_t = dh_t ∘ (1 - h_t²)
                  dx_t = da_t W_ih
                  dW_ih = Σ_t da_tᵀ x_t,  dW_hh = Σ_t da_tᵀ h_(t-1),  db_ih = db_hh = Σ_t Σ_n da_t

    Args:
        units: u.
        last: whether Y is the last state, (n, u), instead of all states, (n, t, u).
    """

    gates = 1

    @staticmethod
    def step(a: Array, *cells: Array) -> tuple[States, Back]:
        h = array_namespace(a).tanh(a)
        return (h,), lambda dh: (dh * (1 - h * h), ())


class LSTM(_Recurrent):
    """Long short-term memory with a forget gate (Gers, Schmidhuber, Cummins: Learning to Forget, 2000).

        forward   a_t = x_t W_ihᵀ + b_ih + h_(t-1) W_hhᵀ + b_hh     (n, 4u), cut into four of (n, u); W_ih (4u, i)
                  i, f, o = sigmoid of the 1st, 2nd, 4th;  g = tanh of the 3rd
                  c_t = f ∘ c_(t-1) + i ∘ g                         the cell state, (n, u)   c_0 = h_0 = 0
                  h_t = o ∘ tanh c_t                                the output, (n, u)
        backward  dh_t = dY_t + da_(t+1) W_hh
                  dc_t = dh_t ∘ o ∘ (1 - tanh² c_t) + dc_(t+1) ∘ f_(t+1)
                  da_t = [dc ∘ g ∘ i(1-i),  dc ∘ c_(t-1) ∘ f(1-f),  dc ∘ i ∘ (1-g²),  dh ∘ tanh c ∘ o(1-o)]
                  dx_t = da_t W_ih, and the weights' as in `RNN`

    Args:
        units: u.
        last: whether Y is the last h, (n, u), instead of all h, (n, t, u).
    """

    gates = 4
    states = 2

    @staticmethod
    def step(a: Array, *cells: Array) -> tuple[States, Back]:
        xp, u, (before,) = array_namespace(a), a.shape[1] // 4, cells
        i, f, o = (sigmoid(a[:, gate * u : (gate + 1) * u]) for gate in (0, 1, 3))
        g = xp.tanh(a[:, 2 * u : 3 * u])
        c = f * before + i * g
        tanh_c = xp.tanh(c)

        def back(dh: Array, dc: Array) -> tuple[Array, States]:
            dc = dh * o * (1 - tanh_c * tanh_c) + dc
            da = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)]
            return xp.concat(da, axis=1), (dc * f,)

        return (o * tanh_c, c), back
