"""Files of Tasks, written for a test."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.support.processes.in_process_command import SMALL


def put(folder: Path, body: str, name: str = "task.py") -> Path:
    """Writes a Task's file that begins with `SMALL`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SMALL + textwrap.dedent(body))
    return path
