"""Runs inside the process of `hotloop run`'s script: starts the exchanges at torch's import."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from hotloop.scripts.child import write_result
from hotloop.scripts.import_hook import ImportHook, imports_from
from hotloop.scripts.traceback_frames import leave_out_our_frames


def wait_for_torch(settings: dict[str, Any]) -> None:
    """Waits for torch; nothing expensive is imported before.

    Args:
        settings: `out`, the file to write; `exact`, whether only bitwise exchanges are allowed; `dry_run`; `accept`, as in `run_with_exchanges`; `script`,
            which identifies the script for later runs; `cache`, the user's cache folder.
    """
    path = sys.path[:]  # without the script's folder
    if "torch" in sys.modules:  # imported by the machine's own `sitecustomize`
        leave_out_our_frames()
        _start_session(path, settings)
        return
    waiting = ImportHook(
        {"torch"},
        before=lambda name: leave_out_our_frames(),  # the import may fail
        then=lambda: _start_session(path, settings),
    )
    waiting.begin()
    os.register_at_fork(after_in_child=waiting.end)


def _start_session(path: list[str], settings: dict[str, Any]) -> None:
    """An internal error may not reach the script, which is importing torch."""
    began_s = time.perf_counter()
    try:
        with imports_from(path):
            from hotloop.exchanges.exchange_session import ExchangeSession

            ExchangeSession(settings | {"began_s": began_s}).install()
    except Exception as error:
        note = f"no exchange was tried by an internal error of hotloop: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_result(settings["out"], {"notes": [note]})
