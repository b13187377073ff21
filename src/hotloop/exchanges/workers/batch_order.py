"""The batches of a script's own sampler, some of which are read ahead for workers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler


class BatchOrder:
    """Takes the place of a sampler's iterator; what was read ahead comes first.

    Attributes:
        taken: number of batches that the script has taken.

    Args:
        source: the sampler's iterator.
        limit: number of batches that may be read ahead.
    """

    def __init__(self, source: Iterator[list[int]], limit: int = sys.maxsize) -> None:
        self._source, self._limit = source, limit
        self._ahead: deque[list[int]] = deque()
        self.taken = 0

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        rows = self._ahead.popleft() if self._ahead else next(self._source)
        self.taken += 1
        return rows

    def read_ahead(self) -> Iterator[list[int]]:
        """Yields the rows of each batch after the one that the script has taken last; the script still takes them all."""
        position = self.taken
        while position < self._limit:
            while len(self._ahead) <= position - self.taken:
                try:
                    self._ahead.append(next(self._source))
                except StopIteration:
                    return
            yield self._ahead[position - self.taken]
            position += 1


def ahead_limit(sampler: Any) -> int | None:
    """Returns how many batches of a sampler may be read ahead without another order of random numbers; None for none.

    Torch's samplers draw all their random numbers at the first batch, which is never read ahead. A `RandomSampler` with a
    generator of the script draws once more at its end, so the last batch isn't read ahead.
    """
    if type(sampler) is not BatchSampler:
        return None
    rows = sampler.sampler
    if type(rows) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler):
        return sys.maxsize
    if type(rows) is not RandomSampler:
        return None
    if rows.generator is None:
        return sys.maxsize
    if rows.replacement or rows.num_samples != len(rows.data_source):
        return None
    return len(sampler) - 1
