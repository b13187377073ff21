"""Where a published figure lies: claims/<date>_<name>/, with the plan, the machine, the versions and all numbers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotloop import __version__
from hotloop.files import write_atomic
from hotloop.plan import Plan
from hotloop.probe import devices, machine

CLAIMS = Path(__file__).parents[1] / "claims"


def circumstances() -> dict[str, Any]:
    """When, on what machine, with which versions and threads something is measured now."""
    processor = machine.processor()
    names = [name for name in devices() if name != "cpu"]
    driver = machine.nvidia()[1] if any(name.startswith("cuda") for name in names) else None
    return {
        "taken": machine.now(),
        "machine": {
            "system": machine.system(),
            "processor": asdict(processor),
            "accelerators": [machine.describe(name, processor.vectors).model or name for name in names],
        },
        "versions": {"hotloop": __version__, **machine.versions(driver)},
        "threads": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
    }


def write_claim(
    name: str, command: str, plan: Plan, figures: dict[str, Any], measured: dict[str, Any] | None = None
) -> Path:
    """Writes `record.json` and `plan.toml`; returns their folder.

    Args:
        measured: the `circumstances` of figures that were measured before; None for those of now.
    """
    record = {"claim": name, "command": command, **(measured or circumstances()), **figures}
    folder = CLAIMS / f"{record['taken'][:10]}_{name}"
    write_atomic(folder / "plan.toml", plan.to_toml())
    write_atomic(folder / "record.json", json.dumps(record, indent=2) + "\n")
    return folder
