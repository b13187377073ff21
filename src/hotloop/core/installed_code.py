"""Which files are installed: Python's own modules, and packages in any environment, as opposed to the user's code."""

from __future__ import annotations

import os
import sysconfig

_PACKAGE_FOLDERS = frozenset(("site-packages", "dist-packages"))
"""Names of folders of packages. A virtual environment can use the packages of another one, whose place Python doesn't name."""

_OWN_FOLDERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    return file.startswith(_OWN_FOLDERS) or is_package_path(file)


def is_package_path(path: str) -> bool:
    """Whether a file or folder is below a folder of packages, or such a folder itself."""
    return not _PACKAGE_FOLDERS.isdisjoint(path.split(os.sep))
