"""Reads IDX files, the format of MNIST.

An IDX file has two zero bytes, a byte for the type, a byte for the number of dimensions, each dimension as a
big-endian uint32, then the big-endian values in C order (http://yann.lecun.com/exdb/mnist/).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from hotloop.errors import DataError

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"
DOWNLOAD_AGAIN = "Delete it and download it again, or give the folder of an intact copy"


def read_idx(path: str | Path) -> np.ndarray:
    """Reads one IDX file; its content shows whether gzip has compressed it.

    Returns:
        A writable array in native byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DataError: the file is missing, unreadable, incomplete, corrupt, or no IDX file.
    """
    path = Path(path)
    content = _unpack(path)
    dtype, shape, start = _parse_header(path, content)
    expected_bytes = math.prod(shape) * dtype.itemsize
    if len(content) - start != expected_bytes:
        raise DataError(
            f"{path} holds {len(content) - start:,} bytes of values",
            expected=f"{expected_bytes:,} for shape {shape} of {dtype.name}",
            fix=DOWNLOAD_AGAIN,
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _unpack(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(GZIP) else content
    except FileNotFoundError as error:
        raise DataError(f"{path} doesn't exist", expected="an IDX file", fix="Check the path") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is a gzip file that is cut off or corrupt ({error})",
            expected="a whole gzip file with an IDX file in it",
            fix=DOWNLOAD_AGAIN,
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror})",
            expected="a readable IDX file",
            fix="Check the path and its permissions",
        ) from error


def _parse_header(path: Path, content: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns the stored dtype, the shape and the offset of the values."""
    if not (len(content) >= 4 and content[:2] == b"\0\0" and content[2] in DTYPES):
        codes = ", ".join(f"{code:02x}" for code in DTYPES)
        raise DataError(
            f"{path} begins with the bytes {content[:4].hex(' ') or '(none: it is empty)'}",
            expected=f"an IDX file: 00 00, a type ({codes}), a number of dimensions",
            fix=DOWNLOAD_AGAIN,
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(
            f"{path} ends after {len(content)} bytes, within its header",
            expected=f"{start} bytes of header for {content[3]} dimensions",
            fix=DOWNLOAD_AGAIN,
        )
    return np.dtype(DTYPES[content[2]]), struct.unpack(f">{content[3]}I", content[4:start]), start
