"""The decisions about a script's exchanges in the user's cache folder, so that its next run needs no race."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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


@dataclass
class Decisions:
    """What earlier runs of a script found.

    Attributes:
        faster: the proven and faster exchanges by the part's title.
        refused: why a proof or a race refused all exchanges, by the part's title. An option of the process has its title
            and the script's arguments, since other arguments may train another network.
        plain: why the script runs as under python, by its arguments.
    """

    faster: dict[str, StoredExchange] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)


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


def read_decisions(folder: Path, key: Mapping[str, Any]) -> tuple[Decisions, list[str]]:
    """Returns the stored decisions, and a note on a file that can't be used."""
    path = decisions_file(folder, key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            raise ValueError("its content does not match its name")
        faster = {title: (part["exchange"], Ratio(**part["ratio"])) for title, part in stored["parts"].items()}
        return Decisions(faster, dict(stored["refused"]), dict(stored["plain"])), []
    except FileNotFoundError:
        return Decisions(), []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Decisions(), [f"the exchanges stored in {path} can't be used ({error}), so they are raced again"]


def write_decisions(folder: Path, key: Mapping[str, Any], found: Decisions) -> list[str]:
    """Stores decisions; returns a note after a failure."""
    parts = {title: {"exchange": name, "ratio": asdict(ratio)} for title, (name, ratio) in found.faster.items()}
    text = {"key": dict(key), "parts": parts, "refused": found.refused, "plain": found.plain}
    try:
        write_atomic(decisions_file(folder, key), json.dumps(text, indent=2))
    except HotloopError as error:
        return [f"the exchanges couldn't be stored for later runs: {error.given}"]
    return []


def decisions_file(folder: Path, key: Mapping[str, Any]) -> Path:
    return folder / "exchanges" / f"{key_digest(key)}.json"
