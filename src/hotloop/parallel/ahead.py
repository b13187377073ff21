"""Random draws of the stages of a model: drawn before a step in the order of one process, and given out row by row."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.parallel.draws import Batchwise, Drawing, Pattern


class Ahead:
    """What one rank's stages draw in a step.

    Each rank draws for the whole batch and for all stages, since a generator comes to where a later stage begins by
    drawing alone; it keeps what is its own.

    Args:
        own: the stages of this rank.
    """

    def __init__(self, pattern: Pattern, own: Collection[int]) -> None:
        self._pattern, self._own = pattern, own
        self._drawn: dict[int, list[tuple[Tensor, Batchwise | None]]] = {}

    def draw(self, of_stages: Sequence[Sequence[Drawing]], rows: int, samples: int) -> None:
        """Draws for a batch, from where torch's generators stand.

        Args:
            of_stages: what each stage draws, in order, for so many rows.
        """
        self._drawn = {stage: [] for stage in self._own}
        number = itertools.count()
        for stage, drawings in enumerate(of_stages):
            for drawing in drawings:
                shape, along = self._pattern.whole(drawing.shape, rows, samples, next(number))
                value = drawing.draw(shape, along and along.order)
                if stage in self._own:
                    self._drawn[stage].append((value, along))

    def given(self, stage: int, first: int, rows: int) -> Given:
        """Has what a stage draws be that of these rows."""
        return Given(iter(self._drawn[stage]), first, rows)


class Given(TorchDispatchMode):
    """Gives operators that draw what was drawn before, in order.

    Args:
        drawn: for the whole batch, each with the dimension along which it goes with the samples.
        first, rows: of the batch.
    """

    def __init__(self, drawn: Iterator[tuple[Tensor, Batchwise | None]], first: int, rows: int) -> None:
        super().__init__()
        self._drawn, self._first, self._rows = drawn, first, rows

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = Drawing.of(function, args, kwargs or {})
        if drawing is None:
            return function(*args, **(kwargs or {}))
        value, along = next(self._drawn)
        if along is not None:
            value = value.narrow(along.dim, self._first * along.each, self._rows * along.each)
        return drawing.finished(args, value)
