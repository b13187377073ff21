"""Selection of later batches whose pieces are compared with the whole batch, within a hundredth of the run's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotloop.data.batch_tree import tree_tensors

_TIME_SHARE = 0.008
"""Share of a run's time for comparisons: a hundredth, minus a reserve for a comparison longer than the earlier ones."""
_COUNTING_TIME_SHARE = 0.3
"""Share of the comparison time for counting padding."""
_FREE_TIME_S = 0.5
"""Seconds of comparison that any run allows."""
_REQUIRED_BATCHES = 3
"""Number of batches with another share of padding that are compared without a time limit, as is any new kind of padding."""
_COUNTED_BATCHES = 64
"""Batches at the beginning whose padding is counted without a time limit."""


class LaterBatches:
    """Selects the batches to compare: the second, fourth, eighth and so on, and each batch whose share of padding differs from
    all compared batches.

    Padding is zeros, negative numbers, NaN, and numbers that equal their predecessor.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._number = self._padded = 0
        self._spent_s = self._counted_s = self._longest_s = 0.0
        self._known: set[PaddingCounts] = set()
        self._kinds: set[tuple[bool, ...]] = set()
        self._waits = False

    def note_first_comparison(self, batch: Any) -> None:
        """Records the batch that was compared before training."""
        self._note(count_padding(batch))

    def is_due(self, batch: Any) -> bool:
        """Checks whether the run's next batch must be compared; called once for each batch."""
        self._number += 1
        power = self._number > 1 and self._number & (self._number - 1) == 0
        self._waits = self._waits or power
        padding = None
        if self._number <= _COUNTED_BATCHES or self._counted_s <= _COUNTING_TIME_SHARE * self._allowed_s:
            before = self._spent_s
            with self._timed():
                padding = count_padding(batch)
            self._counted_s += self._spent_s - before
        other = padding is not None and padding not in self._known
        required = padding is not None and (
            padding.kinds not in self._kinds or (other and self._padded < _REQUIRED_BATCHES)
        )
        affordable = self._spent_s + self._longest_s <= self._allowed_s
        if not required and not (affordable and (other or self._waits)):
            return False
        self._padded += other
        self._waits = False
        if padding is not None:
            self._note(padding)
        return True

    def _note(self, padding: PaddingCounts) -> None:
        self._known.add(padding)
        self._kinds.add(padding.kinds)

    @contextmanager
    def time_comparison(self) -> Iterator[None]:
        """Measures the duration of a comparison."""
        before = self._spent_s
        with self._timed():
            yield
        self._longest_s = max(self._longest_s, self._spent_s - before)

    @property
    def _allowed_s(self) -> float:
        return max(_FREE_TIME_S, _TIME_SHARE * (time.perf_counter() - self._began))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began


class PaddingCounts(NamedTuple):
    """The possible padding of a batch.

    Attributes:
        shapes: the shapes of the batch's tensors.
        counts: for each tensor the numbers of zeros, negative numbers, NaN and repetitions.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether each count is above 0."""
        return tuple(count > 0 for count in self.counts)


def count_padding(batch: Any) -> PaddingCounts:
    """Counts the possible padding of a batch; synchronises with the device once."""
    counted = [
        (tuple(value.shape), _value_counts(value.detach()))
        for value in tree_tensors(batch)
        if value.layout == torch.strided
    ]
    if not counted:
        return PaddingCounts()
    counts = torch.cat([counts for _, counts in counted]).tolist()
    return PaddingCounts(tuple(shape for shape, _ in counted), tuple(counts))


def _value_counts(value: Tensor) -> Tensor:
    """Returns the numbers of zeros, negative numbers, NaN and repetitions: int64 (4,)."""
    if not value.numel() or value.is_complex():
        return torch.zeros(4, dtype=torch.int64, device=value.device)
    zeros, nans = (value == 0).sum(), torch.isnan(value).sum()
    negative = (value < 0).sum() if value.dtype != torch.bool else zeros.new_zeros(())
    repeated = (value[..., 1:] == value[..., :-1]).sum() if value.ndim > 1 else zeros.new_zeros(())
    return torch.stack([zeros, negative, nans, repeated])
