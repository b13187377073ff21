"""The proven and faster exchanges of a script in the user's cache folder, so that its next run needs no race."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hotloop import __version__
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import key_digest
from hotloop.errors import HotloopError
from hotloop.tuning.races.statistics import Ratio

StoredExchange = tuple[str, Ratio]
"""The exchange's name, and the time of the original over that of the exchange."""


def script_key(script: str, *, is_exact: bool = False) -> dict[str, Any]:
    """Returns what the stored exchanges depend on: script, packages and machine.

    Args:
        script: digest of the script's text, or a module's name.
        is_exact: whether only bitwise exchanges are allowed; other runs may have faster exchanges.
    """
    return {
        "script": script,
        "exact": is_exact,
        "host": key_digest({"name": platform.node()}),
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "hotloop": __version__,
    }


def read_exchanges(folder: Path, key: Mapping[str, Any]) -> tuple[dict[str, StoredExchange], list[str]]:
    """Returns the stored exchanges by the part's title, and a note on a file that can't be used."""
    path = _file(folder, key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            raise ValueError("its content does not match its name")
        return {title: (part["exchange"], Ratio(**part["ratio"])) for title, part in stored["parts"].items()}, []
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [f"the exchanges stored in {path} can't be used ({error}), so they are raced again"]


def write_exchanges(folder: Path, key: Mapping[str, Any], exchanges: Mapping[str, StoredExchange]) -> list[str]:
    """Stores exchanges by the part's title; returns a note after a failure."""
    parts = {title: {"exchange": name, "ratio": asdict(ratio)} for title, (name, ratio) in exchanges.items()}
    try:
        write_atomic(_file(folder, key), json.dumps({"key": dict(key), "parts": parts}, indent=2))
    except HotloopError as error:
        return [f"the exchanges couldn't be stored for later runs: {error.given}"]
    return []


def _file(folder: Path, key: Mapping[str, Any]) -> Path:
    return folder / "exchanges" / f"{key_digest(key)}.json"
