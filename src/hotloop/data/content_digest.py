"""A hash of a Task's data, by which a comparison tells runs on the same data from others, such as folds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from hotloop.core.state import bytes_of
from hotloop.data.bundle import Bundle

_HASHED_BYTES = 2**26
"""Bytes of an array that count: of a larger one evenly spaced rows."""


def content_digest(*parts: Any) -> tuple[str, list[str]]:
    """Returns a hash of a Task's `data`, `validation` and `test`, and the types of data whose samples it doesn't cover.

    The samples of a data set of the user's own are unknown: taking one may change its state.
    """
    found, unknown = hashlib.blake2b(digest_size=16), dict[str, None]()
    for part in parts:
        _add(part, found, unknown)
    return found.hexdigest(), list(unknown)


def _add(value: Any, found: Any, unknown: dict[str, None]) -> None:
    found.update(type(value).__name__.encode())
    if value is None or isinstance(value, bool | int | float | str):
        found.update(repr(value).encode())
    elif isinstance(value, Tensor):
        rows = -(-value.nbytes // _HASHED_BYTES) if value.ndim and not value.is_sparse else 1
        found.update(repr((value.dtype, tuple(value.shape))).encode())
        found.update(bytes_of(value[::rows] if rows > 1 else value).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        rows = -(-value.nbytes // _HASHED_BYTES) if value.ndim else 1
        found.update(repr((value.dtype, value.shape)).encode())
        found.update(np.ascontiguousarray(value[::rows] if rows > 1 else value).tobytes())
    elif isinstance(value, Mapping):
        _add(list(value.items()), found, unknown)
    elif isinstance(value, tuple | list):
        if isinstance(value, list) and len(value) > 1 and all(isinstance(one, int | float) for one in value):
            value = [np.asarray(value)]
        for one in value:
            _add(one, found, unknown)
    elif isinstance(value, TensorDataset):
        _add(value.tensors, found, unknown)
    elif isinstance(value, Subset):
        _add([value.dataset, torch.as_tensor(value.indices)], found, unknown)
    elif isinstance(value, ConcatDataset):
        _add(value.datasets, found, unknown)
    elif isinstance(value, DataLoader):
        _add(value.dataset, found, unknown)
    elif isinstance(value, Bundle):
        _add([value.digest, value.train, value.validation, value.test], found, unknown)
    else:
        unknown[type(value).__name__] = None
