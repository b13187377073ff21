"""One call of an operator, as a profiler reports it, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

# Bytes of a number, by the names that torch and, in C++, its profiler use.
_ITEM_BYTES = {
    1: "bool uint8 int8 unsigned_char signed_char c10::Float8_e4m3fn c10::Float8_e5m2 float8_e4m3fn float8_e5m2",
    2: "float16 bfloat16 half int16 uint16 short c10::Half c10::BFloat16",
    4: "float32 float int32 uint32 int",
    8: "float64 double int64 uint64 long long_int long_long complex64 c10::complex<float>",
    16: "complex128 c10::complex<double>",
}
_BYTES_OF = {name.replace("_", " "): size for size, names in _ITEM_BYTES.items() for name in names.split()}
_BYTES_OF |= {name: size for size, names in _ITEM_BYTES.items() for name in names.split()}
INDEX_BYTES = 8  # torch's indices are int64
TENSOR_LIST = "TensorList"
NO_TENSOR = ("", "Scalar", "ScalarList", "None")


class UncountableCall(Exception):
    """The call can't be counted: a shape, a dtype or an argument that the count needs isn't given."""


@dataclass(frozen=True)
class OpCost:
    """What an operator does at the least.

    Attributes:
        flops: arithmetic operations on numbers, a multiplication and an addition being two, as in `Hardware`; a function
            of one number, such as `exp`, is one.
        bytes: tensors read once and written once; None where the dtype isn't known.
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
        shapes: of tensors; of a list of tensors, theirs; empty for what isn't a tensor.
        dtypes: of tensors, as `float32` or in C++'s words; `Scalar` and the like for what isn't a tensor.
        arguments: values of what isn't a tensor, None elsewhere.
    """

    shapes: Sequence[Any]
    dtypes: Sequence[str]
    arguments: Sequence[Any]

    def shape(self, place: int) -> list[int]:
        """Of the tensor there."""
        if place >= len(self.shapes) or any(not isinstance(size, int) for size in self.shapes[place]):
            raise UncountableCall
        return list(self.shapes[place])

    def shapes_of(self, place: int) -> list[list[int]]:
        """Of the list of tensors there."""
        if place >= len(self.shapes) or not all(isinstance(shape, list | tuple) for shape in self.shapes[place]):
            raise UncountableCall
        return [list(shape) for shape in self.shapes[place]]

    def is_list(self, place: int) -> bool:
        """Whether there are several tensors there."""
        return any(isinstance(one, list | tuple) for one in self.shapes[place])

    def count(self, place: int) -> int:
        """Numbers in the tensor there; 1 for a tensor without dimensions."""
        return prod(self.shape(place))

    def given(self, place: int) -> bool:
        """Whether there is a tensor there; without a dtype, its shape tells, which scalars don't have."""
        if place < len(self.dtypes) and self.dtypes[place] not in NO_TENSOR:
            return True
        return place >= len(self.dtypes) and place < len(self.shapes) and bool(self.shapes[place])

    def item(self, place: int) -> float:
        """Bytes of one number of the tensor there; NaN where its dtype isn't known."""
        name = self.dtypes[place] if place < len(self.dtypes) else ""
        return _BYTES_OF.get(name.removeprefix("torch."), math.nan)

    def is_floating(self, place: int) -> bool:
        return any(
            word in "".join(self.dtypes[place : place + 1]).lower() for word in ("float", "double", "half", "complex")
        )

    def size(self, *places: int) -> float:
        """Bytes of the tensors at these places; 0 for those that aren't given."""
        return sum(self.count(place) * self.item(place) for place in places if self.given(place))

    def argument(self, place: int) -> Any:
        """The value there, which the operator needs."""
        if place >= len(self.arguments) or self.arguments[place] is None:
            raise UncountableCall
        return self.arguments[place]

    def mask(self, place: int) -> list[bool]:
        """Which gradients are asked for."""
        return [bool(wanted) for wanted in self.argument(place)]

    @property
    def tensors(self) -> list[int]:
        """Places of tensors; not of lists of them."""
        places = range(max(len(self.shapes), len(self.dtypes)))
        return [place for place in places if self.given(place) and self.dtypes[place : place + 1] != [TENSOR_LIST]]


Formula = Callable[[OpCall], tuple[float, float]]
"""A call -> (FLOPs, bytes); bytes are NaN where a dtype isn't known.

Raises:
    Unknown: a shape or an argument that it needs isn't there.
"""


def broadcast(*shapes: Sequence[int]) -> list[int]:
    """The shape that shapes come to together; they are taken to fit."""
    length = max(map(len, shapes), default=0)
    rows = [[1] * (length - len(shape)) + list(shape) for shape in shapes]
    return [next((size for size in sizes if size != 1), 1) for sizes in zip(*rows, strict=True)]
