"""Folders of this user's, on machines where the user has a home and on those where there is none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pooch


def cache_folder() -> Path:
    """Where this user's measurements and packages are cached; without a home, a folder below the temporary one."""
    folder = _absolute(lambda: pooch.os_cache("hotloop"))
    return Path(tempfile.gettempdir()) / f"hotloop-{_number()}" if folder is None else folder


def data_folder() -> Path | None:
    """Where this user's data are stored that no cleaning of caches removes; None where the user has no home."""
    return _absolute(lambda: platformdirs.user_data_dir("hotloop", appauthor=False))


def _absolute(find: Callable[[], str | Path]) -> Path | None:
    """A folder below the user's home; None without a home, where some versions of platformdirs raise an error."""
    try:
        folder = Path(find())
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None


def _number() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
