"""Caches measured speeds in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder, key_digest
from hotloop.core.hardware.benchmarks import METHOD
from hotloop.core.records.hardware import Device, Processor, Speed
from hotloop.errors import HotloopError


def speed_folder() -> Path:
    return cache_folder() / "devices"


def speed_key(device: Device, processor: Processor) -> dict[str, Any]:
    """Returns everything that a stored speed depends on; the host's name, for shared homes, as a hash."""
    return {
        "method": METHOD,
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "device": device.name,
        "model": device.model,
        "precisions": list(device.precisions),
        "processor": processor.model,
        "threads": processor.threads,
        "torch": torch.__version__,
    }


def read_speed(wanted: dict[str, Any]) -> tuple[Speed | None, list[str]]:
    """Returns the stored speed or None, and notes, such as on a file that can't be used."""
    path = _speed_file(wanted)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("key") != wanted:
            raise ValueError("its content does not match its name")
        return Speed.from_dict(stored.get("speed")), [str(note) for note in stored.get("notes") or ()]
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, HotloopError) as error:
        return None, [f"the stored figures in {path} can't be used ({error}), so they were measured anew"]


def write_speed(wanted: dict[str, Any], speed: Speed, notes: list[str]) -> list[str]:
    """Stores a speed; returns a note after a failure."""
    content = {"key": wanted, "speed": speed.to_dict(), "notes": notes}
    try:
        write_atomic(_speed_file(wanted), json.dumps(content, indent=2))
    except HotloopError as error:
        return [f"the measured figures couldn't be stored: {error.given}"]
    return []


def _speed_file(wanted: dict[str, Any]) -> Path:
    return speed_folder() / f"{wanted['device'].replace(':', '')}-{key_digest(wanted)}.json"
