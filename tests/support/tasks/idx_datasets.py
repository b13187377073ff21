"""A small data set in IDX files, written independently of the reader; and how messages are checked."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from hotloop.data.builtin import FASHION_MNIST
from hotloop.errors import HotloopError

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}
NAMES = tuple(FASHION_MNIST.sha256)


def idx_bytes(array: np.ndarray) -> bytes:
    """An IDX file, written value by value."""
    letter = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "float32": "f", "float64": "d"}[array.dtype.name]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.name], array.ndim, *array.shape)
    return header + struct.pack(f">{array.size}{letter}", *array.ravel().tolist())


def assert_says(error: pytest.ExceptionInfo[HotloopError], *parts: object) -> None:
    """One line that holds all parts, with what was expected and what to do."""
    message = str(error.value)
    assert "\n" not in message and error.value.expected and error.value.fix
    for part in parts:
        assert str(part) in message


def small_files() -> dict[str, bytes]:
    """Four IDX files by name: 40 images to train, 10 to test, each image of one grey of its own."""
    rng = np.random.default_rng(0)
    files = []
    for first, count in ((0, 40), (100, 10)):
        greys = np.arange(first, first + count, dtype=np.uint8)
        files += [
            np.broadcast_to(greys[:, None, None], (count, 28, 28)),
            rng.integers(0, 10, count, dtype=np.uint8),
        ]
    return {name: gzip.compress(idx_bytes(file), mtime=0) for name, file in zip(NAMES, files, strict=True)}


def put(content: dict[str, bytes], folder: Path) -> Path:
    """Writes files into a new folder."""
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder
