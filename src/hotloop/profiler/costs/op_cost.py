"""The arguments of one operator call, as torch's profiler reports them, and the cost of the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

# Bytes per element, by dtype name: torch's names and the C++ names in the profiler's records.
_ITEM_BYTES = {
    1: "bool uint8 int8 unsigned_char signed_char c10::Float8_e4m3fn c10::Float8_e5m2 float8_e4m3fn float8_e5m2",
    2: "float16 bfloat16 half int16 uint16 short c10::Half c10::BFloat16",
    4: "float32 float int32 uint32 int",
    8: "float64 double int64 uint64 long long_int long_long complex64 c10::complex<float>",
    16: "complex128 c10::complex<double>",
}
_BYTES_OF = {name.replace("_", " "): size for size, names in _ITEM_BYTES.items() for name in names.split()}
_BYTES_OF |= {name: size for size, names in _ITEM_BYTES.items() for name in names.split()}
INDEX_BYTES = 8  # torch's index tensors are int64
TENSOR_LIST = "TensorList"
NO_TENSOR = ("", "Scalar", "ScalarList", "None")


class UncountableCall(Exception):
    """The cost of a call is unknown: a shape, a dtype or an argument that the formula needs is missing."""


@dataclass(frozen=True)
class OpCost:
    """The least work of an operator.

    Attributes:
        flops: arithmetic operations. A multiplication with an addition counts as two, as in `Hardware`; a function of
            one element, such as `exp`, counts as one.
        bytes: memory traffic if each tensor is read once and written once; None if a dtype is unknown.
    """

    flops: float
    bytes: float | None

    def __add__(self, other: Self) -> OpCost:
        bytes_ = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        return OpCost(self.flops + other.flops, bytes_)


@dataclass(frozen=True)
class OpCall:
    """The arguments of a call, by position in the operator's schema.

    Attributes:
        shapes: shapes of tensors; a list of shapes for a list of tensors; empty for other arguments.
        dtypes: dtypes of tensors, such as `float32` or the C++ name; `Scalar` and similar names for other arguments.
        arguments: values of the arguments that aren't tensors; None for tensors.
    """

    shapes: Sequence[Any]
    dtypes: Sequence[str]
    arguments: Sequence[Any]

    def shape(self, position: int) -> list[int]:
        if position >= len(self.shapes) or any(not isinstance(size, int) for size in self.shapes[position]):
            raise UncountableCall
        return list(self.shapes[position])

    def shapes_of(self, position: int) -> list[list[int]]:
        if position >= len(self.shapes) or not all(isinstance(shape, list | tuple) for shape in self.shapes[position]):
            raise UncountableCall
        return [list(shape) for shape in self.shapes[position]]

    def is_list(self, position: int) -> bool:
        return any(isinstance(shape, list | tuple) for shape in self.shapes[position])

    def count(self, position: int) -> int:
        """Returns the number of elements of a tensor; 1 for a tensor without dimensions."""
        return prod(self.shape(position))

    def given(self, position: int) -> bool:
        """Returns whether the argument is a tensor. If no dtype is recorded, only tensors have a shape."""
        if position < len(self.dtypes) and self.dtypes[position] not in NO_TENSOR:
            return True
        return position >= len(self.dtypes) and position < len(self.shapes) and bool(self.shapes[position])

    def item(self, position: int) -> float:
        """Returns the bytes per element of a tensor; NaN if its dtype is unknown."""
        name = self.dtypes[position] if position < len(self.dtypes) else ""
        return _BYTES_OF.get(name.removeprefix("torch."), math.nan)

    def is_floating(self, position: int) -> bool:
        return any(
            word in "".join(self.dtypes[position : position + 1]).lower()
            for word in ("float", "double", "half", "complex")
        )

    def size(self, *positions: int) -> float:
        """Returns the bytes of several tensors together; arguments that aren't tensors count as 0."""
        return sum(self.count(position) * self.item(position) for position in positions if self.given(position))

    def argument(self, position: int) -> Any:
        """Returns the value of an argument that isn't a tensor.

        Raises:
            UncountableCall: the value isn't recorded.
        """
        if position >= len(self.arguments) or self.arguments[position] is None:
            raise UncountableCall
        return self.arguments[position]

    def mask(self, position: int) -> list[bool]:
        """Returns which gradients the call computes, from its output mask."""
        return [bool(is_computed) for is_computed in self.argument(position)]

    @property
    def tensors(self) -> list[int]:
        """Positions of the tensors, without lists of tensors."""
        positions = range(max(len(self.shapes), len(self.dtypes)))
        return [
            position
            for position in positions
            if self.given(position) and self.dtypes[position : position + 1] != [TENSOR_LIST]
        ]


Formula = Callable[[OpCall], tuple[float, float]]
"""Maps a call to (FLOPs, bytes); bytes are NaN if a dtype is unknown. Raises `UncountableCall`."""


def broadcast(*shapes: Sequence[int]) -> list[int]:
    """Returns the shape that shapes broadcast to; the shapes must be compatible."""
    length = max(map(len, shapes), default=0)
    padded = [[1] * (length - len(shape)) + list(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)]
