"""What a peer compiles is kept where only the same peer and workload find it, so that a start is known as cold or warm."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.claim import sources
from bench.speed.lanes import versions_of_peers
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.hardware import machine

_FILLED = "filled.json"
"""A file that says with what this cache was begun, and of the start that went through with it."""

_SOURCES = ("data", "job", "marks", "models", "tasks", "workloads")
"""What `tasks.py` is, and imports of the bench."""


def caches(folder: Path) -> dict[str, str]:
    """Where a process keeps what it compiled and found, headers included."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    return {
        "XDG_CACHE_HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # else it keeps none of the short ones
        "TMPDIR": str(temporary),
    }


def begun(folder: Path) -> tuple[dict[str, str], str]:
    """The same for a start with this cache, and its state; what other versions left there is gone."""
    by = _kept(folder).get("by")
    if by not in (None, _asked()):
        shutil.rmtree(folder)
    if by != _asked():
        note_filled(folder, None)
    return caches(folder), state(folder)


def own_cache(home: Path, workload: str, *script: str) -> Path:
    """That of a peer's script with its options."""
    return home / "cache" / workload / re.sub(r"[^\w.-]", "_", "-".join(script))


def state(folder: Path) -> str:
    """`cold` if it's empty, `warm` if a start with these versions filled it, else `half-warm`: a start was cut off."""
    if filled(folder) is not None:
        return "warm"
    held = (path for path in folder.rglob("*") if path.is_file() and path != folder / _FILLED)
    return "half-warm" if any(held) else "cold"


@dataclass(frozen=True)
class Filled:
    """The start that filled a cache.

    Attributes:
        seconds: from the process's start to the end of its first step.
        cache: what it found: `cold` or `half-warm`.
        peak_bytes: the most memory that its process held.
    """

    seconds: float
    cache: str
    peak_bytes: int | None = None


def filled(folder: Path) -> Filled | None:
    """The start that filled it; None if none did, or what it was asked, or with what, has changed since."""
    kept = _kept(folder)
    return Filled(**kept["start"]) if kept.get("start") and kept["by"] == _asked() else None


def note_filled(folder: Path, start: Filled | None) -> None:
    """Notes by which versions it is filled, and the start that did it; None while none went through."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / _FILLED, json.dumps({"by": _asked(), "start": start and asdict(start)}))


def _kept(folder: Path) -> dict[str, Any]:
    try:
        kept = json.loads((folder / _FILLED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _asked() -> str:
    """What a plan that was found depends on, besides the machine: versions, hotloop's sources, and those of the Task."""
    digest = hashlib.sha256(repr((machine.library_versions(None), versions_of_peers(), sources())).encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()
