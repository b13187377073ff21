"""The hash of a Task's data: other data have another, and data sets of the user's own are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from hotloop.data import content_digest as module
from hotloop.data.content_digest import content_digest

X, Y = torch.arange(40.0).reshape(10, 4), torch.arange(10)
OTHER = torch.cat([X[:9], -X[9:]])


class Own(Dataset):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was taken")

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, Y), (OTHER, Y)),
        ((X.numpy(), Y.numpy()), (OTHER.numpy(), Y.numpy())),
        ({"x": X, "y": Y}, {"x": OTHER, "y": Y}),
        (TensorDataset(X, Y), TensorDataset(OTHER, Y)),
        (DataLoader(TensorDataset(X, Y)), DataLoader(TensorDataset(OTHER, Y))),
        (Subset(TensorDataset(X, Y), [1, 2]), Subset(TensorDataset(X, Y), [1, 3])),
        (Subset(Own(), range(5)), Subset(Own(), range(5, 10))),
        (ConcatDataset([TensorDataset(X)]), ConcatDataset([TensorDataset(OTHER)])),
        ([(one, 1) for one in X], [(one, 1) for one in OTHER]),
        ((X, [0] * 10), (X, [0] * 9 + [1])),
        ((X, Y), (X.double(), Y)),
    ],
    ids=[
        "tensors",
        "arrays",
        "dict",
        "data set",
        "loader",
        "subset",
        "own subset",
        "together",
        "list",
        "labels",
        "dtype",
    ],
)
def test_other_data_have_another_hash(one: Any, other: Any) -> None:
    assert content_digest(one, None, None) == content_digest(one, None, None)
    assert content_digest(one, None, None)[0] != content_digest(other, None, None)[0]
    assert content_digest((X, Y), one, None)[0] != content_digest((X, Y), other, None)[0]


def test_an_own_data_set_is_named_and_not_read() -> None:
    assert content_digest(Own(), 0.1, None)[1] == ["Own"]
    assert content_digest((X, Y), 0.1, None)[1] == []


def test_of_a_large_array_evenly_spaced_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HASHED_BYTES", 100)
    numbers = np.arange(1000.0).reshape(100, 10)
    moved = np.roll(numbers, 1, axis=0)
    assert content_digest(numbers)[0] == content_digest(numbers.copy())[0] != content_digest(moved)[0]
