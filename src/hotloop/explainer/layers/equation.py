"""What an equation is made of: tensors of one call in float64, and terms that compute with them."""

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
        result: its name, such as `dW`.
        text: its right side.
        value: computes it in plain matrix operations.
        flops: that it takes.
        reads: the tensors that it reads, as they lie in memory.
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
        forward: the first term named `Z` gives the call's output.
        backward: terms of gradients, each preceded by what it needs.
    """

    operands: dict[str, Tensor]
    forward: list[EquationTerm]
    backward: list[EquationTerm]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FunctionCall:
    """One call of a torch function, its floating-point tensors in float64, and the gradients of its outputs.

    Attributes:
        function: which takes these arguments.
        gradients: one for each output; zeros for an output that nothing flows back to.
        drawn: runs a function with the random numbers that the call had.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[Tensor]
    gradients: list[Tensor]
    drawn: Callable[[Callable[[], Tensor]], Tensor]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument, given by position or by name."""
        if place < len(self.arguments):
            return self.arguments[place]
        return self.options.get(name, default)

    def tensor(self, place: int, name: str) -> Tensor:
        value = self.get(place, name)
        if not isinstance(value, Tensor):
            raise NotCovered(f"its {name} is no tensor")
        return value

    @property
    def dz(self) -> Tensor:
        return self.gradients[0]


class NotCovered(Exception):
    """This way to call a function is not one that the equations cover; says why."""


Formula = Callable[[FunctionCall], LayerEquations]


def dot_flops(rows: int, inner: int, columns: int) -> float:
    """Of a matrix product (rows, inner) by (inner, columns)."""
    return 2.0 * rows * inner * columns


def sum_to_shape(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Summed over the dimensions that broadcasting `shape` had added or stretched."""
    return value.sum_to_size(tuple(shape)) if list(value.shape) != list(shape) else value


def named_operands(**operands: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in operands.items() if value is not None}


def per_dimension(values: Any, dims: int) -> list[int]:
    """A kernel, stride, ... for each dimension."""
    if isinstance(values, int):
        return [values] * dims
    listed = [int(value) for value in values]
    return listed * dims if len(listed) == 1 else listed


def ones_like(value: Tensor) -> Tensor:
    return torch.ones_like(value, memory_format=torch.preserve_format)
