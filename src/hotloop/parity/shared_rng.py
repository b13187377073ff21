"""Shared random draws: other Programs draw as plans that draw in pieces of a batch or by words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotloop.core.random.rng import RandomStreams, generator_states, preserve_generators
from hotloop.core.task_parts.models import copy_model, set_training
from hotloop.core.torch_private import TorchDispatchMode
from hotloop.data.batch_tree import to_device
from hotloop.data.feeds.feed import first_batch
from hotloop.distributed.wrappers.global_batch_rng import (
    BatchDimension,
    DrawRecorder,
    RandomDraw,
    RandomOp,
    batch_dimension,
)
from hotloop.lowering.context import counts_samples
from hotloop.lowering.program import Program
from hotloop.lowering.rewrites.dropout_from_words import WordDrawMode
from hotloop.lowering.transforms.accumulation import piece_bounds
from hotloop.parity.references import run_within

_FEW, _MORE = 2, 3
"""Batch sizes of the two runs that show how a model draws."""


@dataclass(frozen=True)
class RandomOpPlace:
    """One draw of a model's forward pass, and its dimension along the samples."""

    drawing: RandomOp
    along: BatchDimension

    def draw_shape(self, rows: int) -> Tensor:
        """Draws numbers for `rows` samples."""
        shape = list(self.drawing.shape)
        shape[self.along.dim] = rows * self.along.each
        return self.drawing.draw(tuple(shape), self.along.order)

    def samples(self, shape: tuple[int, ...]) -> int:
        """Returns the number of samples that draw this shape; 0 for another draw."""
        like = len(shape) == len(self.drawing.shape)
        return shape[self.along.dim] // self.along.each if like else 0


@dataclass(frozen=True)
class RandomOps:
    """The draws of a model's forward pass, in order.

    Attributes:
        irregular: why draws of pieces can't be combined; empty if they can.
    """

    places: tuple[RandomOpPlace, ...] = ()
    irregular: str = ""


def find_random_ops(program: Program) -> RandomOps:
    """Runs a copy of the model on 2 and on 3 samples; a step may have more draws than these runs show."""
    try:
        with preserve_generators(*program.devices):
            few, more = (_observe_draws(program, samples) for samples in (_FEW, _MORE))
    except Exception:  # the step itself raises its error
        return RandomOps()
    if few.elsewhere or more.elsewhere:
        return RandomOps(irregular="numbers come from Python's or NumPy's generator")
    if not few.drawn and not more.drawn:
        return RandomOps()
    if len(few.known) != len(few.drawn):
        return RandomOps(irregular="an operation computes with what it draws")
    if [draw.name for draw in few.drawn] != [draw.name for draw in more.drawn]:
        return RandomOps(irregular="a batch of another size draws other numbers")
    if not counts_samples(program.parts):
        return RandomOps(irregular="a piece in which nothing counts draws nothing")
    places = []
    for drawing, one, other in zip(few.known, few.drawn, more.drawn, strict=True):
        if one.shape == other.shape:
            return RandomOps(irregular="what is drawn once for a batch is drawn once for each piece")
        dimension = batch_dimension(one, other, (_FEW, _MORE))
        if dimension is None or drawing.how is None or not one.dense:
            return RandomOps(irregular=f"how {one.name} draws isn't known well enough")
        places.append(RandomOpPlace(drawing, dimension))
    return RandomOps(tuple(places))


@dataclass
class _ObservedDraws:
    drawn: list[RandomDraw]
    known: list[RandomOp]
    elsewhere: bool


def _observe_draws(program: Program, samples: int) -> _ObservedDraws:
    """Returns all draws of a copy of the model, those that can be repeated, and whether other generators moved."""
    parts = program.parts
    model = set_training(copy_model(parts.model), parts.in_eval)
    batch = to_device(first_batch(parts.splits, samples), parts.device)
    RandomStreams(parts.task.seed, parts.device).reseed("look")
    before = generator_states()
    with _DrawObserver() as known, DrawRecorder(parts.device) as watching, torch.no_grad():
        parts.compute(model, batch)
    after = generator_states()
    moved = any(before[name] != after[name] for name in before if name != "torch's")
    return _ObservedDraws(watching.drawn, known.drawings, moved)


class _DrawObserver(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.drawings: list[RandomOp] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (drawing := RandomOp.of(function, args, kwargs or {})) is not None:
            self.drawings.append(drawing)
        return function(*args, **(kwargs or {}))


class WordDraws:
    """Draws by words, after the rewrite of `lowering/rewrites/dropout_from_words.py`."""

    irregular, description = "", "which are cut out of random words"

    def follow(self, programs: Sequence[Program]) -> AbstractContextManager[None]:
        """Makes Programs that run operation by operation draw by words."""
        return run_within(programs, WordDrawMode)


@dataclass
class PieceDraws:
    """Draws of a batch's pieces, one after the other, combined to the draws of the whole batch.

    Attributes:
        device: device of the generator.
        count: number of pieces.
        irregular: why the draws can't be combined; empty as long as they can.
    """

    description: ClassVar[str] = "which come for each piece of a batch"

    device: torch.device
    count: int
    places: tuple[RandomOpPlace, ...]
    irregular: str = ""

    def drawn(self, samples: int) -> Iterator[Tensor]:
        """Draws piece by piece from torch's generator; yields the numbers of the whole batch."""
        rows = [last - first for first, last in itertools.pairwise(piece_bounds(samples, self.count)) if first < last]
        of_pieces = [[place.draw_shape(count) for place in self.places] for count in rows]
        for number, place in enumerate(self.places):
            yield torch.cat([values[number] for values in of_pieces], dim=place.along.dim)

    @contextmanager
    def follow(self, programs: Sequence[Program]) -> Iterator[None]:
        """Makes Programs that take a whole batch draw the pieces' numbers."""
        before = [(program, program.parts) for program in {id(program): program for program in programs}.values()]
        try:
            for program, _ in before:
                replayed = _ReplayedDraws(self)
                draws = program._step.draws
                draws.seed = _redraw(draws.seed, replayed)  # type: ignore[method-assign]
                program.parts = replace(program.parts, around=(*program.parts.around, replayed.replaying))
            yield
        finally:
            for program, parts in before:
                program._step.draws.__dict__.pop("seed", None)
                program.parts = parts


def _redraw(seed: Any, replayed: _ReplayedDraws) -> Any:
    def seeded(step: int) -> None:
        seed(step)
        replayed.begin()

    return seeded


class _ReplayedDraws(TorchDispatchMode):
    """Gives each random operator the next of the pieces' numbers for the whole batch.

    Where a step draws otherwise than the first runs, it draws by itself and `irregular` has the reason.
    """

    def __init__(self, pieces: PieceDraws) -> None:
        super().__init__()
        self._pieces = pieces
        self._number = 0
        self._drawn: Iterator[Tensor] | None = None

    def replaying(self) -> _ReplayedDraws:
        return self

    def begin(self) -> None:
        self._number, self._drawn = 0, None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawing = RandomOp.of(function, args, kwargs)
        value = None if drawing is None else self._next(drawing)
        result = function(*args, **kwargs)
        if drawing is None or value is None:
            return result
        if isinstance(result, tuple):
            return drawing.finish(args, value)
        return result.copy_(value)  # preserves the strides

    def _next(self, drawing: RandomOp) -> Tensor | None:
        places, number = self._pieces.places, self._number
        self._number += 1
        if number >= len(places):
            return self._none("a step draws more often than in the first run")
        expected = places[number].drawing
        if (drawing.name, drawing.how) != (expected.name, expected.how):
            return self._none(f"{drawing.name} draws otherwise than in the first run")
        if self._drawn is None:
            self._drawn = self._pieces.drawn(places[number].samples(drawing.shape))
        value = next(self._drawn)
        if tuple(value.shape) != drawing.shape:
            return self._none(f"{drawing.name} draws into another shape than in the first run")
        return value

    def _none(self, why: str) -> Tensor | None:
        self._pieces.irregular = self._pieces.irregular or why
        return None
