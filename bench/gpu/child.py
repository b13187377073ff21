"""The process that runs the parts of one check: it reads a part's name from stdin, and reports how the part ended.

    python -m bench.gpu.child bench.gpu.checks.devices --device cuda --scratch FOLDER --reports DESCRIPTOR

When stdin ends while a part runs, the process that gave the order is gone: this one then ends with all that it started.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from bench.gpu.setting import Result, Setting, Skipped

Run = Callable[[str, Setting], Result]


def orders() -> queue.Queue[str | None]:
    """Lines of stdin as they come; None at the end. Whoever is still running a part then is killed."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            found.put(line.strip())
        found.put(None)
        time.sleep(_ENDING_S)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return found


_ENDING_S = 2.0
"""What an idle process may take to end by itself."""


def attempted(run: Run, part: str, setting: Setting) -> dict[str, Any]:
    """How a part ended, as the report has it."""
    began = time.monotonic()
    try:
        result = run(part, setting)
    except Skipped as reason:
        return {"status": "skipped", "figure": str(reason), "seconds": time.monotonic() - began}
    except Exception as error:
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"status": "failed", "figure": failure, "seconds": time.monotonic() - began}
    if result.wrong:
        print(f"failed: {result.wrong}", file=sys.stderr)
    return {
        "status": "failed" if result.wrong else "passed",
        "figure": result.wrong or result.figure,
        "figures": dict(result.figures),
        "seconds": time.monotonic() - began,
    }


def release_memory() -> None:
    """Gives the device's memory back, so that the next part finds it free."""
    import gc

    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--device", required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--reports", type=int, required=True)
    given = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    setting = Setting(given.device, given.rehearse, given.scratch)
    waiting = orders()
    with os.fdopen(given.reports, "w") as reports:
        while (part := waiting.get()) is not None:
            ended = attempted(_of(given.module), part, setting)
            sys.stdout.flush()
            reports.write(json.dumps(ended) + "\n")
            reports.flush()
            release_memory()


def _of(module: str) -> Run:
    """Imports the check when the first part begins, so that a failing import is that part's failure."""
    return lambda part, setting: import_module(module).run(part, setting)


if __name__ == "__main__":
    main()
