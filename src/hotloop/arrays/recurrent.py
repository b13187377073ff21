"""Recurrent layers: each step of a sequence passes a state to the next.

Backward runs from the last step and carries the state's derivative (Werbos: Backpropagation Through Time, 1990).
Sequences are (n, t, i): n samples of t steps of i numbers.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from hotloop.arrays.activations import sigmoid
from hotloop.arrays.backend import Array, ArrayFactory, Shape
from hotloop.arrays.layer import Layer, ShapeMismatch, check_integers


class _Recurrent(Layer):
    """Weights and shapes of all recurrent layers; a step computes `gates` vectors of u numbers."""

    gates: int

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

    def _from_input(self, x: Array) -> Array:
        """Returns the input's part of all activations, with both biases: (n, t, g·u)."""
        return x @ self.weights["weight_ih"].T + (self.weights["bias_ih"] + self.weights["bias_hh"])

    def _outputs(self, states: list[Array]) -> Array:
        """Returns Y: the state after each step, or the last state."""
        return states[-1] if self.last else array_namespace(states[-1]).stack(states[1:], axis=1)

    def _output_gradient(self, dy: Array, step: int) -> Array:
        """Returns the loss's derivative with respect to the state after a step."""
        if self.last:
            return dy if step == self._x.shape[1] - 1 else 0.0 * dy
        return dy[:, step, :]

    def _collect(self, da: Array) -> Array:
        """Returns dX of dA (n, t, g·u), the activations' derivative, and fills `gradients`."""
        xp, rows = array_namespace(da), da.shape[-1]
        before = xp.stack(self._states[:-1], axis=1)
        flat = xp.reshape(da, (-1, rows))
        self.gradients["weight_ih"] = flat.T @ xp.reshape(self._x, (-1, self._x.shape[2]))
        self.gradients["weight_hh"] = flat.T @ xp.reshape(before, (-1, self.units))
        bias = xp.sum(flat, axis=0)
        self.gradients["bias_ih"], self.gradients["bias_hh"] = (
            bias,
            xp.asarray(bias, copy=True),
        )  # clipping changes each in place
        return da @ self.weights["weight_ih"]

    _x: Array
    _states: list[Array]

    def _begin(self, x: Array) -> Array:
        """Stores X and returns h_0: zeros."""
        xp = array_namespace(x)
        self._x = x
        zeros = xp.zeros((x.shape[0], self.units), dtype=x.dtype, device=x.device)
        self._states = [zeros]
        return zeros

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

    def forward(self, x: Array, training: bool = False) -> Array:
        xp, h = array_namespace(x), self._begin(x)
        given = self._from_input(x)
        for step in range(x.shape[1]):
            h = xp.tanh(given[:, step, :] + h @ self.weights["weight_hh"].T)
            self._states.append(h)
        return self._outputs(self._states)

    def backward(self, dy: Array) -> Array:
        xp, steps = array_namespace(dy), self._x.shape[1]
        following = 0.0
        das = []
        for step in reversed(range(steps)):
            h = self._states[step + 1]
            da = (self._output_gradient(dy, step) + following) * (1 - h * h)
            following = da @ self.weights["weight_hh"]
            das.append(da)
        return self._collect(xp.stack(das[::-1], axis=1))


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

    def forward(self, x: Array, training: bool = False) -> Array:
        xp, h = array_namespace(x), self._begin(x)
        c = h
        self._steps: list[tuple[Array, ...]] = []
        given, u = self._from_input(x), self.units
        for step in range(x.shape[1]):
            a = given[:, step, :] + h @ self.weights["weight_hh"].T
            i, f, o = (sigmoid(a[:, gate * u : (gate + 1) * u]) for gate in (0, 1, 3))
            g = xp.tanh(a[:, 2 * u : 3 * u])
            before, c = c, f * c + i * g
            tanh_c = xp.tanh(c)
            h = o * tanh_c
            self._steps.append((i, f, g, o, before, tanh_c))
            self._states.append(h)
        return self._outputs(self._states)

    def backward(self, dy: Array) -> Array:
        xp = array_namespace(dy)
        following = dc_following = 0.0
        das = []
        for step in reversed(range(len(self._steps))):
            i, f, g, o, before, tanh_c = self._steps[step]
            dh = self._output_gradient(dy, step) + following
            dc = dh * o * (1 - tanh_c * tanh_c) + dc_following
            da = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)]
            das.append(xp.concat(da, axis=1))
            following = das[-1] @ self.weights["weight_hh"]
            dc_following = dc * f
        return self._collect(xp.stack(das[::-1], axis=1))
