"""The present state of runs for a live page, read again when their files change."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from hotloop.core.files.run_folder import StoredRun, find_runs, is_alive, read_status
from hotloop.errors import HotloopError, RunError
from hotloop.report.run_curves import overlaid_figures, run_figures
from hotloop.report.run_list import run_row

MAX_RUNS = 8
"""Runs with curves on one page: the newest."""

_MAX_POINTS = 500

_FILES = ("run.json", "plan.toml", "journal.jsonl", "metrics.jsonl", "progress.jsonl", "system.jsonl", "status.json")

_MAX_LOAD = 0.05
"""Largest share of time that reading takes: runs with long files are read less often."""

_SEARCH_S = 2.0
"""Seconds between searches for new runs."""

_CHECK_S = 1.0
"""Seconds between checks whether a run trains."""


class LiveRuns:
    """The runs in a folder, or the run that the folder is; safe for several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._searched_at = self._read_at = -_SEARCH_S
        self._wait_s = 0.0
        self._is_training, self._check_at = False, 0.0
        self._signature: Any = None
        self._version, self._snapshot = 0, dict[str, Any]()

    def snapshot(self) -> tuple[int, dict[str, Any]]:
        """Returns a version, which changes with the content, and what the page shows."""
        with self._lock:
            if time.monotonic() - self._read_at < self._wait_s:
                return self._version, self._snapshot
            began = time.monotonic()
            signature = [_signature(path) for path in self._runs()]
            if signature != self._signature:
                self._snapshot, self._signature = _snapshot(self._paths), signature
                self._version += 1
            self._read_at = time.monotonic()
            self._wait_s = (self._read_at - began) / _MAX_LOAD
            return self._version, self._snapshot

    def is_training(self) -> bool:
        with self._lock:
            began = time.monotonic()
            if began >= self._check_at:
                self._is_training = any(
                    is_alive(status) and _is_open(status) for status in map(read_status, self._runs())
                )
                ended = time.monotonic()
                self._check_at = ended + max(_CHECK_S, (ended - began) / _MAX_LOAD)
            return self._is_training

    def read(self, name: str) -> StoredRun:
        """Returns one of the runs.

        Raises:
            RunError: the folder has no run of this name.
        """
        with self._lock:
            path = next((path for path in self._runs() if str(path) == name), None)
        if path is None:
            raise RunError("there is no such run on this page", fix="open a run from the list")
        return StoredRun.read(path)

    def _runs(self) -> list[Path]:
        if time.monotonic() - self._searched_at >= _SEARCH_S:
            self._paths = sorted(find_runs(self._folder), key=_created, reverse=True)
            self._searched_at = time.monotonic()
        return self._paths


def _is_open(status: dict[str, Any]) -> bool:
    """Returns whether the training process still writes: after its end the process may do other work, as a notebook."""
    return status.get("event") not in ("stop", "final")


def _created(path: Path) -> float:
    try:
        return (path / "run.json").stat().st_ctime
    except OSError:
        return 0.0


def _signature(path: Path) -> tuple[Any, ...]:
    found: list[Any] = [path, is_alive(read_status(path))]
    for name in _FILES:
        try:
            stat = (path / name).stat()
            found.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _snapshot(paths: list[Path]) -> dict[str, Any]:
    runs, rows = [], []
    for number, path in enumerate(paths):
        try:
            run = StoredRun.read(path, has_curves=number < MAX_RUNS)
            rows.append(_row(run))
        except HotloopError:  # removed meanwhile
            continue
        if number < MAX_RUNS:
            runs.append(run)
    figures = run_figures(runs[0], _MAX_POINTS) if len(runs) == 1 else []
    if len(runs) > 1:
        figures = overlaid_figures(runs, [str(run.path) for run in runs], _MAX_POINTS)
    return {"runs": rows, "figures": figures, "runs_with_curves": len(runs)}


def _row(run: StoredRun) -> dict[str, Any]:
    status = run.status
    shown = {key: status.get(key) for key in ("epoch", "batch", "batches", "loss", "samples_per_s", "remaining_s")}
    damages = "; ".join(run.damages)
    return {**run_row(run), **shown, "message": run.reason if run.state == "failed" else damages}
