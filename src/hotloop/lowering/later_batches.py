"""Which batches after the first are compared in parts and as a whole, within a hundredth of the run's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotloop.data.tree import tensors

_SHARE = 0.008
"""Of a run's time, for comparing batches: a hundredth, less what a comparison may take longer than those before it."""
_COUNTING = 0.3
"""Of that time, for counting padding, so that some is left to compare in."""
_FREE_S = 0.5
"""Seconds of comparing that no run is too short for."""
_ALWAYS = 3
"""Batches with another share of padding that are compared whatever that takes, beside those with another kind of it."""
_LOOKED_AT = 64
"""Batches at the beginning whose padding is counted whatever that takes."""


class LaterBatches:
    """Says batch by batch whether it is to be compared: the second, fourth, eighth and so on, and each whose share of
    padding differs from that of all batches compared before.

    What counts as padding: zeros, negative numbers, NaN, and numbers that repeat the one before them.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._number = self._padded = 0
        self._spent_s = self._counted_s = self._longest_s = 0.0
        self._known: set[Padding] = set()
        self._kinds: set[tuple[bool, ...]] = set()
        self._waits = False

    def compared_first(self, batch: Any) -> None:
        """Notes the batch that was compared before training."""
        self._note(padding_of(batch))

    def is_due(self, batch: Any) -> bool:
        """Whether the next batch of the run is to be compared; called once for each."""
        self._number += 1
        power = self._number > 1 and self._number & (self._number - 1) == 0
        self._waits = self._waits or power
        padding = None
        if self._number <= _LOOKED_AT or self._counted_s <= _COUNTING * self._allowed_s:
            before = self._spent_s
            with self._timed():
                padding = padding_of(batch)
            self._counted_s += self._spent_s - before
        other = padding is not None and padding not in self._known
        surely = padding is not None and (padding.kinds not in self._kinds or (other and self._padded < _ALWAYS))
        affordable = self._spent_s + self._longest_s <= self._allowed_s
        if not surely and not (affordable and (other or self._waits)):
            return False
        self._padded += other
        self._waits = False
        if padding is not None:
            self._note(padding)
        return True

    def _note(self, padding: Padding) -> None:
        self._known.add(padding)
        self._kinds.add(padding.kinds)

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Times a comparison."""
        before = self._spent_s
        with self._timed():
            yield
        self._longest_s = max(self._longest_s, self._spent_s - before)

    @property
    def _allowed_s(self) -> float:
        return max(_FREE_S, _SHARE * (time.perf_counter() - self._began))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - began


class Padding(NamedTuple):
    """What of a batch may be padding.

    Attributes:
        shapes: of its tensors.
        counts: of each tensor the zeros, negative numbers, NaN and repetitions.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Which kinds there are at all."""
        return tuple(count > 0 for count in self.counts)


def padding_of(batch: Any) -> Padding:
    """Counts what may be padding; waits for the device once."""
    counted = [
        (tuple(value.shape), _counts(value.detach())) for value in tensors(batch) if value.layout == torch.strided
    ]
    if not counted:
        return Padding()
    counts = torch.cat([counts for _, counts in counted]).tolist()
    return Padding(tuple(shape for shape, _ in counted), tuple(counts))


def _counts(value: Tensor) -> Tensor:
    """Zeros, negative numbers, NaN and repetitions: int64 (4,)."""
    if not value.numel() or value.is_complex():
        return torch.zeros(4, dtype=torch.int64, device=value.device)
    zeros, nans = (value == 0).sum(), torch.isnan(value).sum()
    negative = (value < 0).sum() if value.dtype != torch.bool else zeros.new_zeros(())
    repeated = (value[..., 1:] == value[..., :-1]).sum() if value.ndim > 1 else zeros.new_zeros(())
    return torch.stack([zeros, negative, nans, repeated])
