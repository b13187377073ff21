"""Assigns samples to batches, by (seed, epoch) alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotloop.core.random.rng import generator_for
from hotloop.errors import DataError


@dataclass(frozen=True)
class Order:
    """The Task's order of samples, independent of plan, device and number of workers.

    Attributes:
        samples: number of samples.
        batch_size: samples in a batch; the last batch of an epoch may be smaller.
        seed: the Task's seed.
        shuffle: whether each epoch has a new permutation; else the order of the data.
        drop_last: whether an incomplete last batch is left out.
    """

    samples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size}", expected="1 or more", fix="choose a larger batch_size")
        if self.batch_size > self.samples:
            raise DataError(
                f"batch_size={self.batch_size} is larger than the data ({self.samples} samples)",
                expected=f"at most {self.samples}",
                fix="choose a smaller batch_size",
            )

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def size(self, number: int) -> int:
        """Returns the samples in batch `number` of an epoch."""
        return min(self.batch_size, self.samples - number * self.batch_size)

    def epoch(self, epoch: int) -> Tensor:
        """Returns the sample numbers of one epoch in their order: int64 (samples,)."""
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=generator_for(self.seed, "order", epoch))

    def batch(self, permutation: Tensor, number: int) -> Tensor:
        """Returns the sample numbers of batch `number` of an epoch's `permutation`: int64 (batch,)."""
        return permutation[number * self.batch_size : (number + 1) * self.batch_size]


def rank_bounds(samples: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns begin and end of a rank's rows of a batch: consecutive, sizes differ by at most 1."""
    return samples * rank // ranks, samples * (rank + 1) // ranks


@dataclass(frozen=True)
class RankRows(Order):
    """The rows of each batch for rank `rank` of `ranks`; a rank without rows takes the first, which doesn't count."""

    rank: int = 0
    ranks: int = 1

    def batch(self, permutation: Tensor, number: int) -> Tensor:
        whole = super().batch(permutation, number)
        first, last = rank_bounds(len(whole), self.rank, self.ranks)
        return whole[first:last] if first < last else whole[:1]


@dataclass(frozen=True)
class DealtBatches(Order):
    """The whole batches that rank `rank` of `ranks` takes, in turn."""

    rank: int = 0
    ranks: int = 1

    @property
    def batches(self) -> int:
        return len(range(self.rank, super().batches, self.ranks))

    def batch(self, permutation: Tensor, number: int) -> Tensor:
        return super().batch(permutation, self.rank + number * self.ranks)


def split_positions(samples: int, share: float | int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns sorted int64 sample numbers for training and for validation, drawn by seed.

    Args:
        samples: number of samples.
        share: share of validation in (0, 1), or a number of samples.
        seed: the Task's seed.
    """
    validation = round(samples * share) if isinstance(share, float) else share
    if not 0 < validation < samples:
        raise DataError(
            f"validation={share!r} of {samples} samples",
            expected=f"a share such as 0.1, or a number from 1 to {samples - 1}, that leaves samples for both",
            fix="choose another share",
        )
    permutation = torch.randperm(samples, generator=generator_for(seed, "validation"))
    return permutation[validation:].sort().values, permutation[:validation].sort().values
