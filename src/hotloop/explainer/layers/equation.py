"""Equations of one call: float64 tensors and the terms that compute with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class EquationTerm:
    """One equation.

    Attributes:
        result: name of the result, such as `dW`.
        text: the right side.
        value: computes the result with plain matrix operations.
        reads: the tensors that the equation reads from memory.
    """

    result: str
    text: str
    value: Callable[[], Tensor]
    flops: float
    reads: Sequence[Tensor]


@dataclass(frozen=True)
class LayerEquations:
    """The equations of one call.

    Attributes:
        operands: tensors among the call's arguments, by their name in the equations; `dW` is the gradient of `W`.
        forward: terms; the first one named `Z` is the call's output.
        backward: terms of gradients, each after the terms it needs.
    """

    operands: dict[str, Tensor]
    forward: list[EquationTerm]
    backward: list[EquationTerm]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FunctionCall:
    """One call of a torch function, its floating-point tensors in float64, and the gradients of its outputs.

    Attributes:
        gradients: one for each output; zeros for an output without a gradient.
        drawn: runs a function with the random state of the recorded call.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[Tensor]
    gradients: list[Tensor]
    drawn: Callable[[Callable[[], Tensor]], Tensor]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Returns an argument by position or name."""
        if position < len(self.arguments):
            return self.arguments[position]
        return self.options.get(name, default)

    def tensor(self, position: int, name: str) -> Tensor:
        value = self.get(position, name)
        if not isinstance(value, Tensor):
            raise NotCovered(f"its {name} is no tensor")
        return value

    @property
    def dz(self) -> Tensor:
        return self.gradients[0]


class NotCovered(Exception):
    """The equations don't cover this form of the call; the message is the reason."""


Formula = Callable[[FunctionCall], LayerEquations]

Side = tuple[str, Callable[[], Tensor], float]
"""The right side of an equation: its text, its value and its FLOPs."""


def one_operand(x: Tensor, z: Side, dx: Side, reads: Sequence[Tensor], notes: Sequence[str] = ()) -> LayerEquations:
    """Returns the equations of a function of one tensor; `reads` are the tensors that dX reads."""
    return LayerEquations({"X": x}, [EquationTerm("Z", *z, [x])], [EquationTerm("dX", *dx, reads)], list(notes))


def dot_flops(rows: int, inner: int, columns: int) -> float:
    """Returns the FLOPs of a matrix product (rows, inner) by (inner, columns)."""
    return 2.0 * rows * inner * columns


def sum_to_shape(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums over the dimensions that broadcasting added to `shape` or expanded."""
    return value.sum_to_size(tuple(shape)) if list(value.shape) != list(shape) else value


def named_operands(**operands: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in operands.items() if value is not None}


def per_dimension(values: Any, dims: int) -> list[int]:
    """Returns a kernel size, stride, ... for each dimension."""
    if isinstance(values, int):
        return [values] * dims
    listed = [int(value) for value in values]
    return listed * dims if len(listed) == 1 else listed


def ones_like(value: Tensor) -> Tensor:
    return torch.ones_like(value, memory_format=torch.preserve_format)
