"""What a peer compiles is kept where only the same peer and workload find it, so that a start is known as cold or warm."""

from __future__ import annotations

import re
from pathlib import Path

_FILLED = "filled"
"""A file that says that a start went through with this cache."""


def caches(folder: Path) -> dict[str, str]:
    """Where a process keeps what it compiled and found, headers included."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    return {
        "XDG_CACHE_HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(temporary),
    }


def own_cache(home: Path, workload: str, *script: str) -> Path:
    """That of a peer's script with its options."""
    return home / "cache" / workload / re.sub(r"[^\w.-]", "_", "-".join(script))


def state(folder: Path) -> str:
    """`cold` if it's empty, `warm` if a start filled it, else `half-warm`: a start was cut off."""
    if (folder / _FILLED).exists():
        return "warm"
    return "half-warm" if any(path.is_file() for path in folder.rglob("*")) else "cold"


def note_filled(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILLED).touch()
