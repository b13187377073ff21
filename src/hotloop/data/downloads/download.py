"""Downloads files into a folder; a file appears there only after its checksum was verified."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pooch
import requests
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hotloop.core.terminal import Bar, Terminal
from hotloop.errors import DataError, DiskError

# Timeouts. Each address is tried once, so that a missing connection is reported within seconds.
CONNECT_S, READ_S = 5, 20


def download_files(urls: tuple[str, ...], sha256: Mapping[str, str], folder: Path) -> str:
    """Downloads the files that `folder` lacks, or has with another checksum.

    Args:
        urls: addresses of folders with the files, tried in turn; each ends in "/".
        sha256: file name -> hex digest.
        folder: the destination, created if needed.

    Returns:
        A short reason for a failure, or "". Files downloaded before the failure stay.

    Raises:
        DiskError: the disk is full.
        DataError: `folder` can't be written.
    """
    with _quiet_pooch(), _progress_bar() as progress:
        for name, digest in sha256.items():
            if failure := _download_file(urls, name, digest, folder, progress):
                return failure
    return ""


def _download_file(urls: tuple[str, ...], name: str, digest: str, folder: Path, progress: Progress) -> str:
    failures = []
    for url in urls:
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(progress, name), timeout=(CONNECT_S, READ_S), chunk_size=1 << 16
        )
        try:
            pooch.retrieve(url + name, f"sha256:{digest}", name, folder, downloader=downloader)
            return ""
        except (requests.RequestException, ValueError) as error:
            failures.append(f"{url} ({_failure_reason(error)})")
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise (DiskError if full else DataError)(
                f"{folder} can't take {name} ({error.strerror or error})",
                expected="a writable folder with 40 MB free",
                fix="Free some space, or give folder= with the files",
            ) from error
    return f"{name} can't be downloaded from {' nor '.join(failures)}"


def _failure_reason(error: Exception) -> str:
    """requests' own messages have several lines."""
    match error:
        case requests.HTTPError(response=requests.Response(status_code=status)):
            return f"HTTP status {status}"
        case requests.Timeout():
            return "no answer in time"
        case requests.exceptions.ChunkedEncodingError():
            return "the connection broke off"
        case requests.exceptions.ProxyError():
            return "the proxy can't be reached"
        case requests.exceptions.SSLError():
            return "no trusted TLS connection"
        case requests.ConnectionError():
            return "no connection"
        case requests.RequestException():
            return type(error).__name__
        case _:
            return "wrong SHA-256, so the file was deleted"


@contextmanager
def _quiet_pooch() -> Iterator[None]:
    """Hides pooch's messages, which repeat the progress bar."""
    logger = pooch.get_logger()
    logger.addFilter(_is_warning)  # a level would persist in the cache of this logger, which has no manager
    try:
        yield
    finally:
        logger.removeFilter(_is_warning)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _progress_bar() -> Progress:
    console = Terminal()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Bar(*columns, console=console, disable=not console.is_terminal)


class _Bar:
    """One file's line in rich's progress, with pooch's interface of a progress bar."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._task = progress, progress.add_task(name, total=None, visible=False)
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, size_bytes: int) -> None:
        self._total = size_bytes
        self._progress.update(self._task, total=size_bytes or None, visible=True)

    def update(self, size_bytes: int) -> None:
        self._progress.advance(self._task, size_bytes)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        """Leaves the line: all lines end together."""
