"""The batches of an epoch as rows of a table, or as the row numbers of several batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hotloop.data.order import Order
from hotloop.data.sources import Table


class RowBatches(Iterator[tuple[Any, int]]):
    """Yields `(batch, samples)`; a caller that cuts batches itself takes the row numbers instead.

    Attributes:
        table: the table with the rows.
        size: samples in each whole batch.

    Args:
        permutation: sample numbers of the epoch in their order, int64 (samples,), on the table's device.
        number: number of the first batch.
    """

    def __init__(self, table: Table, order: Order, permutation: Tensor, number: int) -> None:
        self.table, self.size = table, order.batch_size
        self._order, self._permutation, self._number = order, permutation, number
        self._end = order.batches

    def take(self, batches: int) -> RowBatches:
        """Limits the iteration to `batches` further batches; a later call continues there."""
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
        """Number of the remaining whole batches."""
        return min(self._end, self._order.samples // self.size) - self._number

    def take_rows(self, batches: int) -> Tensor:
        """Returns the sample numbers of the next whole batches, int64 (batches * size,), and skips these batches."""
        first = self._number * self.size
        self._number += batches
        return self._permutation[first : self._number * self.size]
