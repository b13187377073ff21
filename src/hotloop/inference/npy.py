"""Reads inputs from NumPy files, and writes outputs to them."""

from __future__ import annotations

import io
import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from hotloop.core.files.atomic_files import write_atomic
from hotloop.errors import DataError, shorten

_REWRITE_HINT = "write it anew with numpy.savez"
_OTHER_FILES = "images and CSV files need a Task with hotloop.data.image_folder or hotloop.data.csv"
_ENCRYPTED = 1
_MAX_COMPRESSION = 1100
"""Upper bound of the compression ratio; deflate reaches 1,032."""

_MAGIC = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz"}


def read_arrays(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the memory-mapped array of a .npy file, or the arrays of a .npz file by name.

    Raises:
        DataError: the file is missing, has another format, is damaged, or contains Python objects, which could run
            code.
    """
    kind = _suffix_by_content(path)
    try:
        if kind == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        _check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except MemoryError as error:
        raise DataError(
            f"{path} declares arrays larger than the memory", expected="arrays that fit into memory", fix=_REWRITE_HINT
        ) from error
    except (
        ValueError,
        OSError,
        EOFError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        RuntimeError,
    ) as error:
        if "object" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which aren't loaded since they could run code",
                expected="an array of numbers",
                fix="save it as one, such as numpy.asarray(rows, dtype='float32')",
            ) from error
        raise DataError(f"{path} is damaged ({error})", expected=f"a {kind} file", fix=_REWRITE_HINT) from error


def _check_archive(path: Path) -> None:
    """Checks the declarations of a .npz file before its content is read.

    Raises:
        DataError: a member is encrypted, has another compression than numpy.savez's, is no array, or declares more
            bytes than it has.
    """
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            shown = f"{path} has the member {shorten(member.filename)}"
            if member.flag_bits & _ENCRYPTED:
                raise DataError(f"{shown}, which is encrypted", expected="arrays without encryption", fix=_REWRITE_HINT)
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                kind = f"compression {member.compress_type}"
                raise DataError(f"{shown}, which has {kind}", expected="what numpy.savez writes", fix=_REWRITE_HINT)
            if not member.filename.endswith(".npy"):
                raise DataError(f"{shown}, which is no array", expected="arrays alone, named *.npy", fix=_REWRITE_HINT)
            with archive.open(member) as file:
                declared = _declared_bytes(file)
            if declared > member.file_size or member.compress_size * _MAX_COMPRESSION < member.file_size - 4096:
                raise DataError(
                    f"{shown}, which declares {max(declared, member.file_size) / 1e9:.1f} GB and has"
                    f" {member.compress_size / 1e6:.1f} MB",
                    expected="as much as it declares",
                    fix=_REWRITE_HINT,
                )


def _declared_bytes(file: IO[bytes]) -> int:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return math.prod(shape) * dtype.itemsize


def is_array_file(path: Path) -> bool:
    """Returns whether the file begins as a .npy or .npz file, or has such a name."""
    if path.is_file():
        with path.open("rb") as file:
            return file.read(6).startswith(tuple(_MAGIC))
    return path.suffix in _MAGIC.values()


def _suffix_by_content(path: Path) -> str:
    if not path.exists():
        raise DataError(f"no file {path}", expected="a .npy or .npz file", fix="check the path")
    if path.is_dir():
        raise DataError(f"{path} is a folder", expected="a .npy or .npz file", fix=_OTHER_FILES)
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror})", expected="a .npy or .npz file", fix="check the path"
        ) from error
    found = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if found is None:
        raise DataError(
            f"{path} is no .npy or .npz file", expected="one", fix="write it with numpy.save; " + _OTHER_FILES
        )
    return found


def check_output(path: Path, inputs: Path) -> None:
    """Raises DataError for a path that outputs can't be written to."""
    if path.suffix not in (".npy", ".npz", ".csv"):
        raise DataError(f"--out {path}", expected="a name that ends in .npy, .npz or .csv", fix="choose one")
    if path.resolve() == inputs.resolve():
        raise DataError(f"--out {path} is the file with the inputs", expected="another", fix="choose another name")


def write_arrays(path: Path, arrays: np.ndarray | dict[str, np.ndarray]) -> None:
    """Writes an array to a .npy file, or arrays by name to a .npz file (a single array is named `scores`).

    Raises:
        DataError: several arrays for a .npy file.
    """
    stream = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(stream, **(arrays if isinstance(arrays, dict) else {"scores": arrays}))  # type: ignore[arg-type]
    elif isinstance(arrays, dict):
        raise DataError(
            f"the model has several outputs: {', '.join(arrays)}",
            expected="a .npz file for them",
            fix=f"give --out {path.with_suffix('.npz')}, or give the Task a predict(model, inputs) that picks one",
        )
    else:
        np.save(stream, arrays)
    write_atomic(path, stream.getvalue())
