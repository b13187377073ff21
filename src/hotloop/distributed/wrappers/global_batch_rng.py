"""Random numbers of a rank's rows: those that one process would draw for these rows.

All ranks use the same seed. Numbers for each sample, such as a dropout mask, are drawn for the whole batch and cut.
Numbers for all samples, such as noise on weights, are the same on each rank. Batches of two sizes show the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hotloop.core.torch_private import TorchDispatchMode
from hotloop.data.order import rank_bounds
from hotloop.errors import TaskError

_OF_PROBABILITIES = ("bernoulli", "multinomial", "binomial", "poisson")
"""Operators whose draws depend on values that only the rank has."""


@dataclass(frozen=True)
class RandomDraw:
    """One call of a random operator.

    Attributes:
        name, shape: operator, and shape of its output.
        order: dimensions from the largest stride in memory to the smallest.
        dense: whether the output has no gaps in memory.
        is_repeatable: whether `RandomOp` can repeat the call for another number of samples.
    """

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    dense: bool = True
    is_repeatable: bool = True

    @classmethod
    def into(cls, name: str, value: Tensor, repeatable: bool = True) -> RandomDraw:
        order = memory_order(value)
        return cls(name, tuple(value.shape), order, value.permute(order).is_contiguous(), repeatable)


@dataclass(frozen=True)
class BatchDimension:
    """Draws whose dimension `dim` has `each` entries for each sample; `order` as in `RandomDraw`."""

    ndim: int
    dim: int
    each: int
    order: tuple[int, ...] = field(default=(), compare=False)

    def fits(self, shape: Sequence[int], rows: int) -> bool:
        return len(shape) == self.ndim and shape[self.dim] == rows * self.each

    def fits_resized(self, shape: Sequence[int], rows: int) -> bool:
        """Whether `shape` may be of this kind in batches with other sizes of a sample."""
        return len(shape) == self.ndim and shape[self.dim] > 0 and shape[self.dim] % rows == 0

    def resized(self, shape: Sequence[int], rows: int) -> BatchDimension:
        return replace(self, each=shape[self.dim] // rows)


@dataclass(frozen=True)
class DrawPattern:
    """The random draws of a model's step.

    Attributes:
        batchwise: draws for each sample, by their sizes alone: draws in other memory orders count as one.
        single: shapes of draws whose shape doesn't depend on the batch.
        odd: an operator of neither kind; empty if there is none.
        count: number of draws.
        sequence: the repeatable draws in order: a batch dimension, or a shape.
    """

    batchwise: frozenset[BatchDimension] = frozenset()
    single: frozenset[tuple[int, ...]] = frozenset()
    odd: str = ""
    count: int = field(default=0, compare=False)
    sequence: tuple[BatchDimension | tuple[int, ...], ...] = field(default=(), compare=False)

    @classmethod
    def from_draws(cls, few: Sequence[RandomDraw], more: Sequence[RandomDraw], rows: tuple[int, int]) -> DrawPattern:
        """Compares the draws of two batches with `rows` samples."""
        if [draw.name for draw in few] != [draw.name for draw in more]:
            return cls(odd="what draws otherwise for another number of samples")
        sequence: list[BatchDimension | tuple[int, ...]] = []
        single = set()
        for one, other in zip(few, more, strict=True):
            if one.name.rstrip("_") in _OF_PROBABILITIES and one.name != "bernoulli_":
                return cls(odd=one.name)
            if one.shape == other.shape:
                single.add(one.shape)
                sequence += [one.shape] * one.is_repeatable
            elif one.is_repeatable and (found := batch_dimension(one, other, rows)) is not None:
                sequence.append(found)
            else:
                return cls(odd=one.name)
        batchwise = frozenset(one for one in sequence if isinstance(one, BatchDimension))
        return cls(batchwise, frozenset(single), count=len(few), sequence=tuple(sequence))

    @property
    def has_draws(self) -> bool:
        return bool(self.batchwise or self.single)

    def whole_shape(
        self, shape: tuple[int, ...], rows: int, samples: int, number: int
    ) -> tuple[tuple[int, ...], BatchDimension | None]:
        """Returns the shape of a draw for `samples` samples, and its batch dimension; None if the shape is fixed.

        Batches that are padded to another length draw in other shapes, so a kind's dimensions decide if no size fits.

        Args:
            shape: the draw's shape for `rows` samples.
            number: index of the draw, which decides between possible kinds, and of the memory order.

        Raises:
            TaskError: the draw fits no kind, or several.
        """
        usual = self.sequence[number] if number < len(self.sequence) else None
        fitting: list[Any] = [one for one in self.batchwise if one.fits(shape, rows)]
        fitting += [shape] * (shape in self.single)
        if not fitting:
            fitting = [one.resized(shape, rows) for one in self.batchwise if one.fits_resized(shape, rows)]
            fitting += [shape] * any(len(one) == len(shape) for one in self.single)
            if isinstance(usual, BatchDimension) and usual.fits_resized(shape, rows):
                usual = usual.resized(shape, rows)
            elif usual is not None and not isinstance(usual, BatchDimension) and len(usual) == len(shape):
                usual = shape
        fitting = list(dict.fromkeys(fitting))
        if len(fitting) != 1 and usual not in fitting:
            raise TaskError(
                f"random numbers of shape {shape} are drawn in a step, "
                + (
                    "which may be for each sample, or the same for all"
                    if fitting
                    else "which the first check didn't show"
                ),
                expected="draws for each sample, or the same for all",
                fix="use parallel=none",
            )
        found = usual if usual in fitting else fitting[0]
        if not isinstance(found, BatchDimension):
            return shape, None
        return (*shape[: found.dim], samples * found.each, *shape[found.dim + 1 :]), found


def batch_dimension(few: RandomDraw, more: RandomDraw, rows: tuple[int, int]) -> BatchDimension | None:
    """Returns the dimension that scales with the number of samples, if exactly one does."""
    changed = [dim for dim, sizes in enumerate(zip(few.shape, more.shape, strict=False)) if sizes[0] != sizes[1]]
    if len(few.shape) != len(more.shape) or len(changed) != 1:
        return None
    dim = changed[0]
    each, left = divmod(few.shape[dim], rows[0])
    fits = not left and more.shape[dim] == rows[1] * each
    return BatchDimension(len(few.shape), dim, each, few.order) if fits else None


def memory_order(value: Tensor) -> tuple[int, ...]:
    """Returns the dimensions from the largest stride to the smallest, in which torch fills them."""
    strides = value.stride()
    return tuple(sorted(range(value.ndim), key=lambda dim: -strides[dim]))


@dataclass
class DrawRecorder(TorchDispatchMode):
    """Records each operator that changes the state of torch's global generators."""

    device: torch.device
    drawn: list[RandomDraw] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **(kwargs or {}))
        before = [generator.get_state() for generator in _generators(self.device)]
        result = function(*args, **(kwargs or {}))
        after = [generator.get_state() for generator in _generators(self.device)]
        if not all(map(torch.equal, before, after)):
            first = result[0] if isinstance(result, tuple) else result
            repeatable = RandomOp.of(function, args, kwargs or {}) is not None
            self.drawn.append(RandomDraw.into(function.overloadpacket.__name__, first, repeatable))
        return result


def _generators(device: torch.device) -> list[torch.Generator]:
    """Returns the global generators of a step on this device, with the CPU's."""
    of_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *of_device]


class GlobalBatchRng(TorchDispatchMode):
    """Draws for the whole batch, and returns this rank's rows.

    Args:
        samples: number of samples of the whole batch.
        rank, ranks: number of the rank and of ranks; a rank without rows computes the first row.
        in_order: whether draws come in the order of the pattern, as in a forward pass.
    """

    def __init__(self, pattern: DrawPattern, samples: int, rank: int, ranks: int, *, in_order: bool = True) -> None:
        super().__init__()
        first, last = rank_bounds(samples, rank, ranks)
        self.pattern, self.samples, self.first, self.rows = pattern, samples, first, last - first
        self._drawn = 0 if in_order else len(pattern.sequence)
        if not self.rows:
            self.first, self.rows = 0, 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = RandomOp.of(function, args, kwargs or {})
        if (
            drawing is None or (kwargs or {}).get("generator") is not None
        ):  # a generator of the user differs by rank already
            return function(*args, **(kwargs or {}))
        return drawing.finish(args, self._cut(drawing))

    def _cut(self, drawing: RandomOp) -> Tensor:
        shape, batch = self.pattern.whole_shape(drawing.shape, self.rows, self.samples, self._drawn)
        self._drawn += 1
        drawn = drawing.draw(shape, batch and batch.order)
        return drawn if batch is None else drawn.narrow(batch.dim, self.first * batch.each, self.rows * batch.each)


@dataclass(frozen=True)
class RandomOp:
    """A repeatable call of a random operator, without the call's tensors.

    Attributes:
        name: the operator.
        shape: shape of its random numbers.
        draw: `(shape, order)` -> random numbers in this memory order; by default the call's.
        how: rates and scales; None if these are tensors.
    """

    name: str
    shape: tuple[int, ...]
    draw: Callable[..., Tensor]
    how: tuple[Any, ...] | None = ()

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: dict[str, Any]) -> RandomOp | None:
        """Returns the random operator of a call; None for operators that can't be repeated."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        name = function.overloadpacket.__name__
        if name == "native_dropout":
            x, *rest = args
            if rest[1] is False:  # in evaluation
                return None
            like = _empty_like(x)
            own = tuple(x.shape)
            return cls(
                name, own, lambda shape, order=None: function(like(shape, order).fill_(1), *rest)[1], tuple(rest)
            )
        if name.endswith(("_like", "_")):
            x, *rest = args
            if any(isinstance(value, Tensor) and value.ndim for value in rest):
                return None  # probabilities that only the rank has
            like = _empty_like(x)
            own, how = tuple(x.shape), _draw_arguments(rest, kwargs)
            return cls(name, own, lambda shape, order=None: function(like(shape, order), *rest, **kwargs), how)
        size = next((place for place, value in enumerate(args) if isinstance(value, list | tuple)), None)
        if size is None:
            return None
        before, after = args[:size], args[size + 1 :]
        own, how = tuple(args[size]), _draw_arguments([*before, *after], kwargs)
        return cls(name, own, lambda shape, order=None: function(*before, list(shape), *after, **kwargs), how)

    def finish(self, args: Any, drawn: Tensor) -> Any:
        """Returns the call's result from these random numbers."""
        if self.name == "native_dropout":
            p = args[1]
            return args[0] * drawn / (1 - p if p < 1 else math.inf), drawn
        return args[0].copy_(drawn) if self.name.endswith("_") else drawn


def _draw_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the arguments of a distribution, without dtype, device and so on."""
    values = [*args, *(kwargs[key] for key in sorted(kwargs))]
    if any(isinstance(value, Tensor) for value in values):
        return None
    return tuple(value for value in values if isinstance(value, bool | int | float))


def _empty_like(x: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...] | None], Tensor]:
    """Returns a function that makes empty tensors with the memory order of `x`."""
    dtype, device, own = x.dtype, x.device, memory_order(x)

    def made(shape: tuple[int, ...], order: tuple[int, ...] | None) -> Tensor:
        order = order or own
        places = sorted(range(len(order)), key=order.__getitem__)
        return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(places)

    return made
