"""Runs inside the process of a script, before the script starts.

Imports nothing expensive: the script may be short, without torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from types import TracebackType
from typing import Any

from hotloop.core.processes import end_with_parent


def begin(settings: dict[str, Any]) -> None:
    """Calls the function that `run_script` was given.

    Args:
        settings: `parent`, the process that waits for the script; `inside`, the function as `module:name`, which
            receives `settings`; `out`, the file for `write_result`; and the function's own settings.
    """
    end_with_parent(settings["parent"], signal.SIGKILL)  # a script can't handle SIGKILL
    module, _, name = settings["inside"].partition(":")
    getattr(import_module(module), name)(settings)


def mark_stop(path: str) -> None:
    """Says that hotloop stops the script by Ctrl-C, whose traceback tells the user nothing.

    Args:
        path: the file of `write_result`.
    """
    with open(f"{path}.stopped", "w", encoding="utf-8"):
        pass


def hide_stops(path: str) -> None:
    """Leaves out the traceback of a stop that `mark_stop` announced.

    Args:
        path: the file of `write_result`.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (issubclass(kind, KeyboardInterrupt) and os.path.exists(f"{path}.stopped")):
            before(kind, error, trace)

    sys.excepthook = hook


def write_result(path: str, values: dict[str, Any]) -> None:
    """Writes the result that `run_script` reads; the file is replaced atomically."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(f"{path}.part", path)
