"""A network of two layers, and arrays as a data set of samples: what tests of Tasks share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.data import Dataset


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class AsSamples(Dataset):
    """The same arrays, sample by sample: then nobody can look at all targets beforehand."""

    def __init__(self, arrays: tuple[Tensor, Tensor]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.arrays)
