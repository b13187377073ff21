"""The user's folders, on machines with and without a home folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Returns the folder for cached measurements and packages; without a home, in the temporary folder."""
    import platformdirs

    owner = os.getuid() if hasattr(os, "getuid") else 0
    folder = _home_folder(lambda: platformdirs.user_cache_dir("hotloop"))
    return Path(tempfile.gettempdir()) / f"hotloop-{owner}" if folder is None else folder


def data_folder() -> Path | None:
    """Returns the folder for data that a cache cleanup must not remove; None without a home."""
    import platformdirs

    return _home_folder(lambda: platformdirs.user_data_dir("hotloop", appauthor=False))


def _home_folder(find: Callable[[], str | Path]) -> Path | None:
    """Returns a folder in the user's home; None without a home (some versions of platformdirs raise RuntimeError)."""
    try:
        folder = Path(find())
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None


def key_digest(key: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits, which name the cache file of what depends on a JSON key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
