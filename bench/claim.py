"""Where a published figure lies: claims/<date>_<name>/, with the plan, the machine, the versions and all numbers."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import hotloop
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.hardware import machine
from hotloop.core.hardware.devices import device_names
from hotloop.core.hardware.limits import program_output
from hotloop.plan import Plan

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "claims"


@cache
def sources() -> str:
    """SHA-256 of hotloop's sources: between two releases, its version doesn't say which hotloop it is."""
    return digest_of(Path(hotloop.__file__).parent)


def digest_of(*folders: Path) -> str:
    """SHA-256 of the names and contents of all Python files in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            digest.update(f"{name} {size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """The commit that is checked out; None where there is no git. `sources` says whether something was changed since."""
    return program_output("git", "-C", str(ROOT), "rev-parse", "HEAD") if (ROOT / ".git").exists() else None


def circumstances() -> dict[str, Any]:
    """When, on what machine, with which hotloop, versions and threads something is measured now."""
    processor = machine.read_processor()
    names = [name for name in device_names() if name != "cpu"]
    driver = machine.nvidia_gpus()[1] if any(name.startswith("cuda") for name in names) else None
    return {
        "taken": machine.current_time(),
        "machine": {
            "system": machine.operating_system(),
            "processor": asdict(processor),
            "accelerators": [machine.describe_device(name, processor.vectors).model or name for name in names],
        },
        "commit": commit(),
        "versions": {**machine.library_versions(driver), "hotloop_sources": sources()},
        "threads": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
    }


def write_claim(
    name: str, command: str, plan: Plan | None, figures: dict[str, Any], measured: dict[str, Any] | None = None
) -> Path:
    """Writes `record.json` and `plan.toml`; returns their folder.

    Args:
        plan: None where figures are of several plans, which they name themselves.
        measured: the `circumstances` of figures that were measured before; None for those of now.
    """
    record = {"claim": name, "command": command, **(measured or circumstances()), **figures}
    folder = CLAIMS / f"{record['taken'][:10]}_{name}"
    if plan is not None:
        write_atomic(folder / "plan.toml", plan.to_toml())
    write_atomic(folder / "record.json", json.dumps(record, indent=2) + "\n")
    return folder
