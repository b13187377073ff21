"""NumPy's files: inputs in, scores out."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from hotloop.errors import DataError
from hotloop.files import write_atomic

_MAGIC = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz"}


def read_arrays(path: Path) -> np.ndarray | dict[str, np.ndarray]:
    """The array of a .npy file, which stays on the disk until it's used, or the arrays of a .npz file by name.

    Raises:
        DataError: it's gone, is no such file, is damaged, or holds Python objects, which could run code.
    """
    kind = _kind(path)
    try:
        if kind == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if "object" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which aren't loaded since they could run code",
                expected="an array of numbers",
                fix="save it as one, such as numpy.asarray(rows, dtype='float32')",
            ) from error
        raise DataError(f"{path} is damaged ({error})", expected=f"a {kind} file", fix="write it anew") from error


def _kind(path: Path) -> str:
    if not path.exists():
        raise DataError(f"no file {path}", expected="a .npy or .npz file", fix="check the path")
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror})", expected="a .npy or .npz file", fix="check the path"
        ) from error
    found = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if found is None:
        raise DataError(f"{path} is no .npy or .npz file", expected="one", fix="write it with numpy.save")
    return found


def check_output(path: Path, inputs: Path) -> None:
    """Refuses, before the work, a path that outputs can't be written to."""
    if path.suffix not in (".npy", ".npz"):
        raise DataError(f"--out {path}", expected="a name that ends in .npy or .npz", fix="choose one")
    if path.resolve() == inputs.resolve():
        raise DataError(f"--out {path} is the file with the inputs", expected="another", fix="choose another name")


def write_arrays(path: Path, arrays: np.ndarray | dict[str, np.ndarray]) -> None:
    """Writes an array to a .npy file, or arrays by name to a .npz file (one alone is called `scores`).

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
