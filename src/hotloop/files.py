"""Writing files so that a reader, or a kill at any instant, never meets half of one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hotloop.errors import DiskError, RunError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def explained(path: Path, option: str | None = None) -> Iterator[None]:
    """Turns the operating system's refusal to write below `path` into one clear line.

    Args:
        option: of the command, names another place; None for what belongs to a run.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            free = shutil.disk_usage(_existing_parent(path)).free
            raise DiskError(
                f"{path} can't be written: {error.strerror} ({free / 1e6:.0f} MB free on the disk)",
                expected="room for it",
                fix="free some space"
                + (", then go on from the last good checkpoint with --resume" if not option else ""),
            ) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise RunError(
                f"no permission to write {path}",
                expected="a folder that you may write",
                fix=f"choose another with {option or '--run'}",
            ) from error
        raise RunError(f"{path} can't be written: {error.strerror or error}", fix="check the path") from error


def _existing_parent(path: Path) -> Path:
    return next((folder for folder in [path, *path.parents] if folder.exists()), Path.cwd())


def check_writable(path: Path, option: str) -> None:
    """Tries whether a file can be written there, before what takes long; nothing is left behind.

    Raises:
        RunError: it can't be; `option` names another place.
    """
    with explained(path, option):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=_existing_parent(path.absolute().parent)):
            pass


def write_atomic(path: Path, content: bytes | str, option: str | None = None) -> None:
    """Writes `content` to `path`: afterwards it holds all of it, durably, or what it held before.

    Raises:
        DiskError: the disk is full; nothing is left behind.
        RunError: the folder can't be written.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(file: BinaryIO) -> Path:
        file.write(data)
        return path

    write_named(path, write, option)


def write_named(path: Path, write: Callable[[BinaryIO], Path], option: str | None = None) -> Path:
    """The same piece by piece, for a file whose name may tell its content.

    Args:
        path: names the file in messages, and while it is unfinished.
        write: fills it, and says where it belongs, beside `path`.

    Returns:
        where it is.

    Raises:
        DiskError: the disk is full; nothing is left behind.
        RunError: the folder can't be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explained(path, option):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                final = write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)
            sync_folder(path.parent)
            return final
        finally:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in `folder` durable, where the system can (Windows can't and needn't)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
