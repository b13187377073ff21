"""Runs inside the process of a script, before the script starts.

Nothing is imported here that costs anything: the script may be a short one, without torch.
"""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from typing import Any

from hotloop.core.processes.parent_death import end_with_parent


def begin(settings: dict[str, Any]) -> None:
    """Calls the function that `run_script` was given.

    Args:
        settings: `parent`, the process that waits for the script; `inside`, the function as `module:name`, which gets
            `settings` as well; `out`, the file for `write_result`; and what the function needs.
    """
    end_with_parent(settings["parent"], signal.SIGKILL)  # the script may handle other signals
    module, _, name = settings["inside"].partition(":")
    getattr(import_module(module), name)(settings)


def write_result(path: str, values: dict[str, Any]) -> None:
    """Writes the file that `run_script` reads after the script's end; the file is complete at any instant."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(f"{path}.part", path)
