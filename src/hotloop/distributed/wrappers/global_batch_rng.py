"""Random draws of a rank's rows: those that one process would have drawn for them.

All ranks seed alike. What is drawn for each sample, such as a dropout mask, is drawn for the whole batch and cut; what is
drawn once, such as noise on weights, is the same for all as it is. Which is which shows on batches of two sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.data.order import rank_bounds
from hotloop.errors import TaskError

_OF_PROBABILITIES = ("bernoulli", "multinomial", "binomial", "poisson")
"""What they draw depends on values that only the rank has."""


@dataclass(frozen=True)
class RandomDraw:
    """One draw: by which operator, into which shape, and how that lies in memory.

    Attributes:
        order: dimensions from the widest steps in memory to the narrowest.
        dense: whether there are no gaps between its entries.
        repeatable: whether it could be drawn for another number of samples, see `RandomOp`.
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
    """Draws whose dimension `dim` holds `each` entries for each sample; `order` as of `RandomDraw`."""

    ndim: int
    dim: int
    each: int
    order: tuple[int, ...] = field(default=(), compare=False)

    def fits(self, shape: Sequence[int], rows: int) -> bool:
        return len(shape) == self.ndim and shape[self.dim] == rows * self.each


@dataclass(frozen=True)
class DrawPattern:
    """How a model draws.

    Attributes:
        batchwise: draws for each sample.
        single: shapes of draws that are the same for a batch of any size.
        odd: an operator whose draws can't be told apart; empty if there is none.
        count: how many draws there are.
        sequence: in order, those that can be repeated: along what, or of what shape.
    """

    batchwise: frozenset[BatchDimension] = frozenset()
    single: frozenset[tuple[int, ...]] = frozenset()
    odd: str = ""
    count: int = field(default=0, compare=False)
    sequence: tuple[BatchDimension | tuple[int, ...], ...] = field(default=(), compare=False)

    @classmethod
    def from_draws(cls, few: Sequence[RandomDraw], more: Sequence[RandomDraw], rows: tuple[int, int]) -> DrawPattern:
        """What two batches of so many samples have drawn, in order."""
        if [one.name for one in few] != [one.name for one in more]:
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

    def is_whole(
        self, shape: tuple[int, ...], rows: int, samples: int, number: int
    ) -> tuple[tuple[int, ...], BatchDimension | None]:
        """The shape of a draw for `samples` where `rows` of them have this one, and along what; None: the same for all.

        Args:
            number: how many draws came before it, which tells where the shape could be of two sorts.

        Raises:
            TaskError: no such draw was seen, or it can't be told which.
        """
        fitting: list[Any] = [one for one in self.batchwise if one.fits(shape, rows)]
        fitting += [shape] * (shape in self.single)
        usual = self.sequence[number] if number < len(self.sequence) else None
        if len(fitting) != 1 and usual not in fitting:
            raise TaskError(
                f"random numbers of shape {shape} are drawn in a step, "
                + (
                    "which may be for each sample, or the same for all" if fitting else "which a first look didn't show"
                ),
                expected="draws for each sample, or the same for all",
                fix="use parallel=none",
            )
        found = fitting[0] if len(fitting) == 1 else usual
        if not isinstance(found, BatchDimension):
            return shape, None
        return (*shape[: found.dim], samples * found.each, *shape[found.dim + 1 :]), found


def batch_dimension(few: RandomDraw, more: RandomDraw, rows: tuple[int, int]) -> BatchDimension | None:
    """The dimension that goes with the number of samples, if one alone does."""
    changed = [dim for dim, sizes in enumerate(zip(few.shape, more.shape, strict=False)) if sizes[0] != sizes[1]]
    if len(few.shape) != len(more.shape) or len(changed) != 1:
        return None
    dim = changed[0]
    each, left = divmod(few.shape[dim], rows[0])
    fits = not left and more.shape[dim] == rows[1] * each
    return BatchDimension(len(few.shape), dim, each, few.order) if fits else None


def memory_order(value: Tensor) -> tuple[int, ...]:
    """Its dimensions from the widest steps in memory to the narrowest; in that order it is drawn."""
    strides = value.stride()
    return tuple(sorted(range(value.ndim), key=lambda dim: -strides[dim]))


@dataclass
class DrawRecorder(TorchDispatchMode):
    """Notes each operator that draws from torch's generators."""

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
    """The global ones that a step on this device may draw from: a CPU's too, whose numbers it may move there."""
    of_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *of_device]


class GlobalBatchRng(TorchDispatchMode):
    """Draws for the whole batch, and cuts this rank's rows out of that.

    Args:
        samples: of the whole batch.
        rank, ranks: whose rows; one without any computes along on the first.
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
        if drawing is None or (kwargs or {}).get("generator") is not None:  # each rank sets its own generators apart
            return function(*args, **(kwargs or {}))
        return drawing.finish(args, self._cut(drawing))

    def _cut(self, drawing: RandomOp) -> Tensor:
        """This rank's part of what is drawn for the whole batch."""
        shape, found = self.pattern.is_whole(drawing.shape, self.rows, self.samples, self._drawn)
        self._drawn += 1
        drawn = drawing.draw(shape, found and found.order)
        return drawn if found is None else drawn.narrow(found.dim, self.first * found.each, self.rows * found.each)


@dataclass(frozen=True)
class RandomOp:
    """One call of an operator that draws, and how to repeat it; it holds none of the call's tensors.

    Attributes:
        name: of the operator.
        shape: of what it draws.
        draw: `(shape, order)` -> as much drawn in the same way, in this order of memory; in the call's if there is none.
        how: rates and scales; None if they are tensors.
    """

    name: str
    shape: tuple[int, ...]
    draw: Callable[..., Tensor]
    how: tuple[Any, ...] | None = ()

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: dict[str, Any]) -> RandomOp | None:
        """What the call of an operator draws; None if it is no operator of which that is known."""
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
                return None  # by probabilities that only the rank has
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
        """What the call would have returned, had it drawn that."""
        if self.name == "native_dropout":
            p = args[1]
            return args[0] * drawn / (1 - p if p < 1 else math.inf), drawn
        return args[0].copy_(drawn) if self.name.endswith("_") else drawn


def _draw_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The arguments that say how to draw, but for what the numbers are kept in."""
    given = [*args, *(kwargs[key] for key in sorted(kwargs))]
    if any(isinstance(value, Tensor) for value in given):
        return None
    return tuple(value for value in given if isinstance(value, bool | int | float))


def _empty_like(x: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...] | None], Tensor]:
    """Makes tensors without content whose dimensions lie in memory as those of `x`."""
    dtype, device, own = x.dtype, x.device, memory_order(x)

    def made(shape: tuple[int, ...], order: tuple[int, ...] | None) -> Tensor:
        order = order or own
        places = sorted(range(len(order)), key=order.__getitem__)
        return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(places)

    return made
