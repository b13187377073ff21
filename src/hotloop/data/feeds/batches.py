"""The batches of an epoch that are rows of arrays and nothing else: one by one, or of several the rows' numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hotloop.data.order import Order
from hotloop.data.sources import Table


class RowBatches(Iterator[tuple[Any, int]]):
    """Yields `(batch, samples)`; whoever cuts batches himself takes the numbers of several in their place.

    Attributes:
        table: whose rows they are.
        size: samples in each whole batch.

    Args:
        permutation: sample numbers of the epoch in their order, int64 (samples,), where the table lies.
        number: of the first batch.
    """

    def __init__(self, table: Table, order: Order, permutation: Tensor, number: int) -> None:
        self.table, self.size = table, order.batch_size
        self._order, self._permutation, self._number = order, permutation, number
        self._end = order.batches

    def take(self, batches: int) -> RowBatches:
        """The same, at an end after so many more; where it goes on when it is asked again."""
        self._end = min(self._number + batches, self._order.batches)
        return self

    def __next__(self) -> tuple[Any, int]:
        if self._number >= self._end:
            raise StopIteration
        index = self._order.batch(self._permutation, self._number)
        self._number += 1
        return self.table.take(index), len(index)

    @property
    def all_rows(self) -> int:
        """Batches that are left, without one of fewer samples."""
        return min(self._end, self._order.samples // self.size) - self._number

    def take_rows(self, batches: int) -> Tensor:
        """The samples of so many batches that are left whole, which are passed over: int64 (batches * size,)."""
        first = self._number * self.size
        self._number += batches
        return self._permutation[first : self._number * self.size]
