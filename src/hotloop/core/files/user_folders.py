"""The user's folders, on machines with and without a home folder."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotloop.core.files.atomic_files import translate_write_errors


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


def make_private_folder(folder: Path) -> None:
    """Makes a folder that no other user can write, whatever the umask; leaves an existing folder as it is.

    Raises:
        RunError: the folder can't be made.
    """
    with translate_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)


def foreign_access(path: Path) -> str | None:
    """Returns why another user may have written a file or a folder; None if no other user can, or without a file.

    The folder of `path` is checked too. In a folder such as /tmp (mode 1777), other users can't replace `path`.
    """
    if not hasattr(os, "getuid"):  # Windows: the user's folders are private
        return None
    for part in (path, path.parent):
        for status in _statuses(part):
            if status.st_uid not in (os.getuid(), 0):
                return f"{part} belongs to another user"
            if part == path.parent and status.st_mode & stat.S_ISVTX:
                continue  # its owner alone could replace `path`
            is_shared = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
            if (is_shared or status.st_mode & stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
                return f"other users can write {part} (chmod go-w)"
    return None


def _statuses(path: Path) -> list[os.stat_result]:
    """Returns the status of a path and, for a link, of its target; empty for a path that can't be reached."""
    try:
        return [path.lstat(), path.stat()]
    except OSError:
        return []


def _is_own_group(group: int) -> bool:
    """Whether the group is the user's private one, with the same name and no other member."""
    import grp
    import pwd

    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


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
