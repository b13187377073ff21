"""Sends a training's figures to a logger from a thread of its own."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotloop.core.callback import View
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.records.training import EpochRecord
from hotloop.training.loggers.adapters import Adapter, finite

_FIRST_RETRY_S, _LONGEST_RETRY_S = 2.0, 60.0

_CLOSE_S = 60.0
"""Seconds that the end of a training waits for its loggers."""


_CLOSE_ATTEMPTS = 2


@dataclass(frozen=True)
class _Row:
    """Figures of a step; `is_final` for those of the test data, which belong to the step of the last epoch."""

    step: int
    figures: dict[str, float]
    is_final: bool = False


class FigureLogger:
    """A callback that sends the figures of each epoch, and those of the test data.

    The library runs in a thread, so that a slow server doesn't slow down the training. A failure is reported in one line
    and tried again. `<run>/loggers.json` has the record's id and the last step. A resumed run continues the record: epochs
    that the record lacks are sent, and no step is sent twice.

    Args:
        settings: what the library shows as the run's parameters.
    """

    def __init__(self, name: str, adapter: Adapter, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._name, self._adapter, self._settings, self._say = name, adapter, settings, say
        self._rows: deque[_Row] = deque()
        self._news, self._is_closing = threading.Condition(), False
        self._reason, self._id, self._sent = "", "", -1
        self._is_open = self._has_failed = self._is_checked = False
        self._retry_s: float | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Sends what is left when the context ends, and closes the record."""
        try:
            yield
        finally:
            if self._thread is not None:
                with self._news:
                    self._is_closing = True
                    self._news.notify()
                self._thread.join(_CLOSE_S)
                if missing := {row.step for row in list(self._rows) if row.is_final or row.step > self._sent}:
                    self._say(
                        f"{self._name} lacks {len(missing)} epochs: metrics.csv in the run has them, and a resumed run "
                        "sends them"
                    )

    def __call__(self, view: View) -> None:
        if view.event == "start":
            self._path = view.run / "loggers.json"
            self._run = view.run
            self._id, self._sent = _stored_position(self._path, self._name)
            for record in view.history:
                self._add_epoch(record)
            self._thread = threading.Thread(target=self._send_all, name=f"hotloop-{self._name}", daemon=True)
            self._thread.start()
        elif view.event == "epoch":
            self._add_epoch(view.history[-1])
        elif view.event == "stop":
            self._reason = view.reason
        elif view.event == "final":
            figures = {key: value for key, value in (view.final or {}).items() if key.startswith("test_")}
            self._add(_Row(view.step, finite(figures), is_final=True))

    def _add_epoch(self, record: EpochRecord) -> None:
        figures = {key: value for key, value in record.flat().items() if key != "step"}
        self._add(_Row(record.step, finite(figures)))

    def _add(self, row: _Row) -> None:
        if row.figures:
            with self._news:
                self._rows.append(row)
                self._news.notify()

    def _send_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(self._has_news, timeout=self._retry_s)
                is_last = self._is_closing
            try:
                self._send()
                self._retry_s = None
                if is_last and self._is_open:
                    self._close()
            except BaseException as error:  # libraries also raise SystemExit; a logger never ends a training
                self._is_checked = False  # a library may raise after it has recorded the figures
                self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s) if self._retry_s else _FIRST_RETRY_S
                if not self._has_failed:
                    self._has_failed = True
                    self._say(
                        f"{self._name} failed ({_summary(error)}); training goes on, and its figures are sent later"
                    )
            if is_last:
                return

    def _close(self) -> None:
        for attempt in range(1, _CLOSE_ATTEMPTS + 1):
            try:
                self._adapter.close(self._reason)
                break
            except BaseException as error:
                if attempt == _CLOSE_ATTEMPTS:
                    self._say(f"{self._name} can't close its record ({_summary(error)}); the record has all figures")

    def _has_news(self) -> bool:
        return self._is_closing or (bool(self._rows) and self._retry_s is None)

    def _send(self) -> None:
        if not self._is_open and (self._rows or not self._id):
            self._id = self._adapter.open(self._run, self._settings, self._id)
            self._is_open = True
            self._store()
        if self._is_open and not self._is_checked:
            recorded = self._adapter.last_step()
            self._sent = self._sent if recorded is None else recorded
            self._is_checked = True
        while self._rows:
            row = self._rows[0]
            if row.is_final or row.step > self._sent:
                self._adapter.log(row.step, row.figures)
                self._sent = row.step
            self._rows.popleft()
            self._store()

    def _store(self) -> None:
        with _FILE_LOCK:
            known = _read(self._path)
            known[self._name] = {"id": self._id, "step": self._sent}
            write_atomic(self._path, json.dumps(known, indent=2))


_FILE_LOCK = threading.Lock()


def _stored_position(path: Path, name: str) -> tuple[str, int]:
    """Returns the record's id and its last step; an empty id and -1 if the file is missing or damaged."""
    stored = _read(path).get(name)
    if not isinstance(stored, dict) or not isinstance(stored.get("id"), str) or not isinstance(stored.get("step"), int):
        return "", -1
    return stored["id"], stored["step"]


def _summary(error: BaseException) -> str:
    first = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {''.join(first)[:200]}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
