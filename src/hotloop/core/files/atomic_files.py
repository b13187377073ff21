"""Reads and writes files atomically and durably; pipes, devices and folders in place of files raise errors."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hotloop.errors import DiskError, RunError, shorten

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Returns the descriptor of a regular file; opening a pipe without a writer would block.

    Raises:
        RunError: the path is a folder, a pipe, a device, or a link to nothing.
        OSError: the file is missing, or the system refuses.
    """
    if path.is_symlink() and not os.path.exists(path):  # opening would create the link's target
        raise _not_a_file_error(path, "a broken link")
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if path.exists() and (what := _kind_of(os.stat(path).st_mode)) is not None:
            raise _not_a_file_error(path, what) from error
        raise
    if (what := _kind_of(os.fstat(descriptor).st_mode)) is not None:
        os.close(descriptor)
        raise _not_a_file_error(path, what)
    return descriptor


def read_regular(path: Path) -> bytes | None:
    """Returns the content of a regular file; None without a file.

    Raises:
        RunError: the path is no regular file, or the system refuses.
    """
    try:
        with open(open_regular(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} can't be read ({error.strerror})", fix="check the path") from error


def append(path: Path, content: bytes) -> None:
    """Appends to a regular file, durably; an incomplete last line, which a kill leaves, gets a line end first.

    Raises:
        DiskError: the disk is full.
        RunError: the path is no regular file, or the system refuses.
    """
    with translate_write_errors(path), open(open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            content = content if file.read(1) == b"\n" else b"\n" + content
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _kind_of(mode: int) -> str | None:
    return None if stat.S_ISREG(mode) else _FILE_KINDS.get(stat.S_IFMT(mode), "no file")


def _not_a_file_error(path: Path, what: str) -> RunError:
    return RunError(f"{path} is {what}", expected="a file", fix="remove it, or put the file back")


@contextmanager
def translate_write_errors(path: Path, option: str | None = None) -> Iterator[None]:
    """Translates OSErrors of writes below `path` into DiskError or RunError.

    Args:
        option: the command's option for another path; None for paths in a run.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = max(path.absolute().parts, key=len)
            raise RunError(
                f"the name {shorten(name)} is too long for the system",
                expected="at most 255 bytes for each part of a path",
                fix=f"choose a shorter one with {option or '--run'}",
            ) from error
        if error.errno in DISK_FULL:
            free = shutil.disk_usage(_existing_parent(path)).free
            raise DiskError(
                f"{path} can't be written: {error.strerror} ({free / 1e6:.0f} MB free on the disk)",
                expected="enough free space",
                fix="free some space",
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
    """Checks before long work that a file can be written; the check leaves no file.

    Raises:
        RunError: the file can't be written; the message names `option`.
    """
    with translate_write_errors(path, option):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with tempfile.TemporaryFile(dir=_existing_parent(path.absolute().parent)):
            pass


def write_atomic(path: Path, content: bytes | str, option: str | None = None) -> None:
    """Writes a file: after a failure or a kill, the file has either the new or the old content.

    Raises:
        DiskError: the disk is full; no file is left.
        RunError: the folder can't be written.
    """
    data = content.encode() if isinstance(content, str) else content

    def write(file: BinaryIO) -> Path:
        file.write(data)
        return path

    write_named(path, write, option)


def write_named(path: Path, write: Callable[[BinaryIO], Path], option: str | None = None) -> Path:
    """Writes a file like `write_atomic`, piece by piece, with a final name that may depend on the content.

    Args:
        path: the name in messages and of the temporary file.
        write: writes the content; returns the final path, in the folder of `path`.

    Returns:
        the final path.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with translate_write_errors(path, option):
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
    """Makes renames and removals in the folder durable (unnecessary and impossible on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
