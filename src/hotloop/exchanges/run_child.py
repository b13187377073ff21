"""Runs inside the process of `hotloop run`'s script: starts the exchanges at torch's import."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hotloop.scripts.child import ImportHook, imports_from, leave_out_our_frames, write_result


def wait_for_torch(settings: dict[str, Any]) -> None:
    """Waits for torch; nothing expensive is imported before.

    Args:
        settings: `out`, the file to write; `exact`, whether only bitwise exchanges are allowed; `dry_run`; `accept`, as in `run_with_exchanges`; `script`,
            which identifies the script for later runs; `arguments`, which identifies its arguments; `cache`, the user's cache folder.
    """
    path = sys.path[:]  # without the script's folder
    if "torch" in sys.modules:  # imported by the machine's own `sitecustomize`
        _start_session(path, settings, leave_out_our_frames())
        return
    undo: list[Callable[[], None]] = []
    waiting = ImportHook(
        {"torch"},
        before=lambda name: undo.append(leave_out_our_frames()),  # the import may fail
        then=lambda: _start_session(path, settings, undo[0]),
    )
    waiting.begin()
    os.register_at_fork(after_in_child=waiting.end)


def _start_session(path: list[str], settings: dict[str, Any], show_all_frames: Callable[[], None]) -> None:
    """Starts the exchanges, unless earlier runs found that nothing pays.

    An internal error may not reach the script, which is importing torch.
    """
    began_s = time.perf_counter()
    try:
        with imports_from(path):
            from pathlib import Path

            from hotloop.exchanges.exchange_cache import decisions_file, read_decisions, script_key

            folder, key = Path(settings["cache"]), script_key(settings["script"], is_exact=settings["exact"])
            decisions, notes = read_decisions(folder, key)
            if (why := decisions.plain.get(settings["arguments"])) and not settings["dry_run"]:
                show_all_frames()
                note = f"{why}; delete {decisions_file(folder, key)} to try anew"
                facts = {"notes": [note], "own_work_s": time.perf_counter() - began_s, "is_stored": True}
                write_result(settings["out"], facts)
                return
            from hotloop.exchanges.exchange_session import ExchangeSession

            settings = settings | {"began_s": began_s}
            ExchangeSession(settings, key, decisions, notes, show_all_frames).install()
    except Exception as error:
        note = f"no exchange was tried by an internal error of hotloop: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            write_result(settings["out"], {"notes": [note]})
