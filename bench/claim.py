"""Where a published figure lies: claims/<date>_<name>/, with the plan, the machine, the versions and all numbers."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotloop import __version__
from hotloop.files import write_atomic
from hotloop.plan import Plan
from hotloop.probe import machine

CLAIMS = Path(__file__).parents[1] / "claims"


def write_claim(name: str, command: str, plan: Plan, figures: dict[str, Any]) -> Path:
    """Writes `record.json` and `plan.toml`; returns their folder."""
    folder = CLAIMS / f"{time.strftime('%Y-%m-%d')}_{name}"
    record = {
        "claim": name,
        "command": command,
        "taken": machine.now(),
        "machine": {"system": machine.system(), "processor": asdict(machine.processor())},
        "versions": {"hotloop": __version__, **machine.versions(None)},
        **figures,
    }
    write_atomic(folder / "plan.toml", plan.to_toml())
    write_atomic(folder / "record.json", json.dumps(record, indent=2) + "\n")
    return folder
