"""The reader of IDX files."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from hotloop.data.downloads.idx_files import read_idx
from hotloop.errors import DataError
from tests.support.tasks.idx_datasets import CODES, assert_says, idx_bytes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 3), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", CODES)
def test_idx_gives_back_what_was_written(dtype: str, shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    kind = np.dtype(dtype)
    low, high = (-1e30, 1e30) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    array = np.linspace(low, high, math.prod(shape)).astype(kind).reshape(shape)
    path = tmp_path / "any name"
    path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
    result = read_idx(path)
    assert result.dtype == kind and result.dtype.isnative and result.flags.writeable
    assert np.array_equal(result, array) and result.shape == shape


SOUND = idx_bytes(np.arange(600, dtype=np.int16).reshape(2, 300))
PACKED = gzip.compress(SOUND)
SPOILT = {
    "empty": (b"", "empty"),
    "not IDX": (b"\x89PNG and more", "89 50 4e 47"),
    "unknown type": (b"\0\0\x0a\x01" + SOUND[4:], "00 00 0a 01"),
    "three bytes": (SOUND[:3], "00 00 0b"),
    "torn in the header": (SOUND[:9], "ends after 9 bytes"),
    "torn": (SOUND[:-1], "1,199 bytes", "1,200"),
    "too long": (SOUND + b"\0", "1,201 bytes", "1,200"),
    "huge by its header": (b"\0\0\x0b\x04" + b"\xff" * 16, "0 bytes"),
    "gzip, torn": (PACKED[:-20], "cut off or corrupt"),
    "gzip, torn in its header": (PACKED[:5], "cut off or corrupt"),
    "gzip, a byte changed": (PACKED[:60] + bytes([PACKED[60] ^ 1]) + PACKED[61:], "cut off or corrupt"),
    "gzip, wrong checksum": (PACKED[:-8] + b"\1\2\3\4" + PACKED[-4:], "cut off or corrupt"),
    "gzip of something else": (gzip.compress(b"<html></html>"), "3c 68 74 6d"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_idx_file_is_named_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    content, *parts = SPOILT[case]
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_idx(path)
    assert_says(error, path, *parts)


def test_an_idx_file_that_is_missing_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError) as error:
            read_idx(path)
        assert_says(error, path)
