"""Recurrent layers: the same products at each time step, and their gradients through time.

Hochreiter and Schmidhuber, "Long short-term memory", 1997; Cho et al., "Learning phrase representations", 2014. The
gates are in torch's order: i, f, g, o and r, z, n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hotloop.arrays.activations import sigmoid
from hotloop.arrays.recurrent import LSTM, RNN
from hotloop.explainer.layers.equation import EquationTerm, Formula, FunctionCall, LayerEquations, NotCovered

State = tuple[Tensor, ...]
"""(h,) or (h, c), each (batch, hidden)."""


Step = tuple[State, Callable[[State], tuple[Tensor, Tensor, State]]]
"""The state after a step, and the backward: the derivatives of A_x, A_h and the state before, without h's by W_hh."""


def _as_in_arrays(step: Callable[..., Any]) -> Callable[[Tensor, Tensor, State], Step]:
    """Returns the step of a cell of `hotloop.arrays`."""

    def cell(gx: Tensor, gh: Tensor, state: State) -> Step:
        after, backward = step(gx + gh, *state[1:])

        def back(grads: State) -> tuple[Tensor, Tensor, State]:
            da, cells = backward(*grads)
            return da, da, (torch.zeros_like(grads[0]), *cells)

        return after, back

    return cell


def _relu_step(a: Tensor) -> tuple[State, Callable[[Tensor], tuple[Tensor, State]]]:
    return (a.clamp(min=0),), lambda dh: (dh * (a > 0).to(a.dtype), ())


def _gru(gx: Tensor, gh: Tensor, state: State) -> Step:
    (xr, xz, xn), (hr, hz, hn) = gx.chunk(3, -1), gh.chunk(3, -1)
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    before = state[0]

    def back(grads: State) -> tuple[Tensor, Tensor, State]:
        dh = grads[0]
        dn = dh * (1 - z) * (1 - n * n)
        dr, dz = dn * hn * r * (1 - r), dh * (before - n) * z * (1 - z)
        return torch.cat((dr, dz, dn), -1), torch.cat((dr, dz, dn * r), -1), (dh * z,)

    return ((1 - z) * n + z * before,), back


@dataclass(frozen=True)
class CellKind:
    """A cell: its step, its number of gates, and its equation."""

    step: Callable
    gates: int
    text: str


CELL_KINDS = {
    "lstm": CellKind(
        _as_in_arrays(LSTM.step), 4, "o tanh c at each step, c = f c' + i g; i, f, o = sigmoid A, g = tanh A"
    ),
    "gru": CellKind(_gru, 3, "(1 - z) n + z h' at each step; r, z = sigmoid A, n = tanh(A_x + r A_h)"),
    "rnn_tanh": CellKind(_as_in_arrays(RNN.step), 1, "tanh A at each step"),
    "rnn_relu": CellKind(_as_in_arrays(_relu_step), 1, "max(A, 0) at each step"),
}


@dataclass(frozen=True)
class DirectionPass:
    """One direction of one layer.

    Attributes:
        x: (rows, in), ordered by time step.
        sizes: batch size of each time step; longer sequences come first.
        start: initial state.
        weights: W_ih, W_hh, and biases if the layer has them.
        is_backwards: whether the pass runs from the last time step to the first.
    """

    kind: CellKind
    x: Tensor
    sizes: Sequence[int]
    start: State
    weights: Sequence[Tensor]
    is_backwards: bool

    @property
    def order(self) -> list[slice]:
        """Rows of each time step, in order of execution."""
        ends = list(accumulate(self.sizes))
        rows = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        return rows[::-1] if self.is_backwards else rows

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor, list[Callable], State]:
        """Outputs and previous h of each step, both (rows, hidden); the backward of each step; the last state."""
        w_ih, w_hh, *biases = self.weights
        b_ih, b_hh = biases or (0.0, 0.0)
        gx, state = self.x @ w_ih.T + b_ih, self.start
        outputs, before = (self.x.new_empty(len(self.x), w_hh.shape[1]) for _ in range(2))
        backs = []
        for rows in self.order:
            size = rows.stop - rows.start
            active = tuple(part[:size] for part in state)
            before[rows] = active[0]
            after, back = self.kind.step(gx[rows], active[0] @ w_hh.T + b_hh, active)
            outputs[rows] = after[0]
            backs.append(back)
            state = tuple(torch.cat((new, old[size:])) for new, old in zip(after, state, strict=True))
        return outputs, before, backs, state

    def gradients(self, dz: Tensor, last: State) -> dict[str, Tensor]:
        """Returns the gradients of all inputs, from those of the outputs (rows, hidden) and of the last state."""
        _, before, backs, _ = self.outputs
        w_ih, w_hh, *biases = self.weights
        gx, gh = (dz.new_empty(len(dz), len(weight)) for weight in (w_ih, w_hh))
        grads = list(last)
        for rows, back in zip(reversed(self.order), reversed(backs), strict=True):
            size = rows.stop - rows.start
            gx[rows], gh[rows], kept = back((grads[0][:size] + dz[rows], *(grad[:size] for grad in grads[1:])))
            earlier = (kept[0] + gh[rows] @ w_hh, *kept[1:])
            grads = [torch.cat((new, old[size:])) for new, old in zip(earlier, grads, strict=True)]
        found = {"X": gx @ w_ih, "W_ih": gx.T @ self.x, "W_hh": gh.T @ before}
        if biases:
            found |= {"b_ih": gx.sum(0), "b_hh": gh.sum(0)}
        return found | {f"start{place}": grad for place, grad in enumerate(grads)}


@dataclass(frozen=True)
class LayerStack:
    """All layers and directions of one call; `x` and `sizes` as in `DirectionPass`."""

    kind: CellKind
    x: Tensor
    sizes: Sequence[int]
    starts: State
    weights: list[Sequence[Tensor]]
    directions: int

    @cached_property
    def passes(self) -> list[DirectionPass]:
        found: list[DirectionPass] = []
        x = self.x
        for number, weights in enumerate(self.weights):
            start = tuple(start[number] for start in self.starts)
            found.append(
                DirectionPass(self.kind, x, self.sizes, start, weights, is_backwards=number % self.directions > 0)
            )
            if (number + 1) % self.directions == 0:
                x = torch.cat([sweep.outputs[0] for sweep in found[-self.directions :]], -1)
        return found

    @property
    def output(self) -> Tensor:
        return torch.cat([sweep.outputs[0] for sweep in self.passes[-self.directions :]], -1)

    def gradients(self, dz: Tensor, last: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Returns gradients per pass; the first layer's `X`, summed, are the gradient of the input."""
        found: list[dict[str, Tensor]] = []
        for number in reversed(range(len(self.passes))):
            part = dz.chunk(self.directions, -1)[number % self.directions]
            found.insert(0, self.passes[number].gradients(part, tuple(grad[number] for grad in last)))
            if number % self.directions == 0:
                dz = sum(one["X"] for one in found[: self.directions])  # type: ignore[assignment]
        return found


def recurrent_layer(call: FunctionCall) -> LayerEquations:
    """Arguments: input, states, weights, ...; packed: rows, batch sizes, states, weights, ..."""
    packed = isinstance(call.arguments[1], Tensor) and not call.arguments[1].is_floating_point()
    x, *_, states, weights = call.arguments[: 4 if packed else 3]
    biases, layers, dropped, training, both, *first = call.arguments[4 if packed else 3 :]
    if dropped and training and layers > 1:
        raise NotCovered("it drops numbers between its layers, which can't be drawn again")
    starts = tuple(states) if isinstance(states, list | tuple) else (states,)
    per, directions = (4 if biases else 2), (2 if both else 1)
    if len(weights) != per * layers * directions:
        raise NotCovered("its outputs are projected")
    grouped = [weights[place : place + per] for place in range(0, len(weights), per)]
    batchless, batch_first = x.ndim == 2 and not packed, bool(first and first[0]) and x.ndim == 3

    def inward(value: Tensor) -> Tensor:
        """Returns (rows, ...), ordered by time step."""
        if packed or batchless:
            return value
        return (value.transpose(0, 1) if batch_first else value).flatten(0, 1)

    def outward(value: Tensor) -> Tensor:
        if packed or batchless:
            return value
        timed = value.unflatten(0, (-1, sizes[0]))
        return timed.transpose(0, 1) if batch_first else timed

    samples = 1 if batchless else len(x) if batch_first else x.shape[1]
    sizes = call.arguments[1].tolist() if packed else [samples] * (inward(x).shape[0] // samples)
    states_of = [one.unsqueeze(1) if batchless else one for one in starts]
    last = [grad.unsqueeze(1) if batchless else grad for grad in call.gradients[1:]]
    stack = LayerStack(CELL_KINDS[call.name], inward(x), sizes, tuple(states_of), grouped, directions)
    return _stack_equations(stack, x, starts, stack.gradients(inward(call.gradients[0]), last), outward)


def recurrent_cell(call: FunctionCall) -> LayerEquations:
    """input, states, W_ih, W_hh, b_ih, b_hh: one step."""
    x, states, *weights = call.arguments
    if x.ndim != 2:
        raise NotCovered("its input has no batch")
    starts = tuple(states) if isinstance(states, list | tuple) else (states,)
    kind = CELL_KINDS[call.name.removesuffix("_cell")]
    present = [weight for weight in weights if weight is not None]
    stack = LayerStack(kind, x, [len(x)], tuple(one[None] for one in starts), [present], 1)
    last = [grad[None] for grad in call.gradients]
    return _stack_equations(stack, x, starts, stack.gradients(torch.zeros_like(call.dz), last), lambda value: value)


def _stack_equations(
    stack: LayerStack, x: Tensor, starts: State, found: list[dict[str, Tensor]], outward: Callable[[Tensor], Tensor]
) -> LayerEquations:
    operands: dict[str, Tensor] = {"X": x}
    forward: list[EquationTerm] = []
    backward: list[EquationTerm] = []
    tokens = len(stack.x)
    for number, (sweep, grads) in enumerate(zip(stack.passes, found, strict=True)):
        tag = f"_l{number // stack.directions}" * (len(found) > 1) + "_reverse" * (number % stack.directions)
        w_ih, w_hh = sweep.weights[:2]
        operands |= {
            f"{name}{tag}": value for name, value in zip(("W_ih", "W_hh", "b_ih", "b_hh"), sweep.weights, strict=False)
        }
        into, hidden = 2.0 * tokens * w_ih.numel(), 2.0 * tokens * w_hh.numel()
        gates = _empty(tokens, w_ih)
        z = sweep.outputs[0]
        source = "X" if number < stack.directions else "the layer's below"
        text = f"{source} W_ih^T + h W_hh^T" + " + b" * (len(sweep.weights) > 2)
        forward.append(
            EquationTerm(f"A{tag}", text, partial(_identity, gates), into + hidden, [sweep.x, z, w_ih, w_hh])
        )
        backward.append(
            EquationTerm(
                f"dA{tag}",
                "back through the gates, the last step first",
                partial(_identity, gates),
                hidden,
                [gates, w_hh],
            )
        )
        backward += [
            EquationTerm(f"dW_ih{tag}", "dA^T X", partial(_identity, grads["W_ih"]), into, [gates, sweep.x]),
            EquationTerm(
                f"dW_hh{tag}", "dA^T h, of the steps before", partial(_identity, grads["W_hh"]), hidden, [gates, z]
            ),
        ]
        if len(sweep.weights) > 2:
            backward += [
                EquationTerm(f"d{name}{tag}", "sum of dA", partial(_identity, grads[name]), gates.numel(), [gates])
                for name in ("b_ih", "b_hh")
            ]
        if number >= stack.directions or x.requires_grad:
            backward += _input_terms(stack, found, number, into, [gates, w_ih], outward)
    output = stack.output
    elementwise = 3.0 * stack.kind.gates * sum(sweep.outputs[0].numel() for sweep in stack.passes)
    forward.append(EquationTerm("Z", stack.kind.text, lambda: outward(output), elementwise, [output]))
    for place, start in enumerate(starts):
        name = ("h0", "c0")[place]
        operands[name] = start
        value = torch.stack([grads[f"start{place}"] for grads in found]).reshape(start.shape)
        backward.append(
            EquationTerm(f"d{name}", "what flows back beyond the first step", partial(_identity, value), 0, [])
        )
    notes = [f"time steps, one after the other: {len(stack.sizes)}"] + ["in both directions"] * (stack.directions > 1)
    return LayerEquations(operands, forward, backward, notes)


def _identity(value: Tensor) -> Tensor:
    return value


def _empty(rows: int, weight: Tensor) -> Tensor:
    """Returns an uninitialized tensor of the shape of the gates, for its size."""
    return weight.new_empty(1).expand(rows, len(weight))


def _input_terms(
    stack: LayerStack, found: list[dict[str, Any]], number: int, flops: float, reads: list[Tensor], outward: Callable
) -> list[EquationTerm]:
    """Returns the terms of the gradient for the layer below; the first layer's is dX, summed over directions."""
    layer, direction = divmod(number, stack.directions)
    own = found[number]["X"]
    if not layer and stack.directions == 1:
        return [EquationTerm("dX", "dA W_ih", lambda: outward(own), flops, reads)]
    terms = [EquationTerm(f"dX_l{layer}" + "_reverse" * direction, "dA W_ih", lambda: own, flops, reads)]
    if not layer and direction:
        both = [one["X"] for one in found[: stack.directions]]
        terms.append(EquationTerm("dX", "dX_l0 + dX_l0_reverse", lambda: outward(sum(both)), own.numel(), both))
    return terms


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(CELL_KINDS, recurrent_layer),
    **dict.fromkeys([f"{name}_cell" for name in CELL_KINDS], recurrent_cell),
}
