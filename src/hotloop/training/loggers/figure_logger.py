"""Sends a training's figures to a logger from a thread of its own."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotloop.core.callback import View
from hotloop.core.files.atomic_files import write_atomic
from hotloop.training.loggers.adapters import Adapter, finite

_FIRST_RETRY_S, _LONGEST_RETRY_S = 2.0, 60.0

_CLOSE_S = 30.0
"""Seconds that the end of a training waits for its loggers."""


class FigureLogger:
    """A callback that sends the figures of each epoch, and those of the test data.

    The library runs in a thread, so that a slow server doesn't slow down the training. A failure is reported in one line
    and tried again. `<run>/loggers.json` holds the record's id and the last step, so that a resumed run goes on in the same
    record and sends no step twice.

    Args:
        settings: what the library shows as the run's parameters.
    """

    def __init__(self, name: str, adapter: Adapter, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._name, self._adapter, self._settings, self._say = name, adapter, settings, say
        self._rows: deque[tuple[int, dict[str, float]]] = deque()
        self._news, self._is_closing = threading.Condition(), False
        self._reason, self._id, self._sent = "", "", -1
        self._is_open = self._has_failed = False
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
                if self._thread.is_alive() or self._rows:
                    self._say(f"{self._name} lacks {len(self._rows)} epochs; metrics.csv in the run has them")

    def __call__(self, view: View) -> None:
        if view.event == "start":
            self._path = view.run / "loggers.json"
            self._run = view.run
            stored = _read(self._path).get(self._name, {})
            self._id, self._sent = str(stored.get("id", "")), int(stored.get("step", -1))
            self._thread = threading.Thread(target=self._send_all, name=f"hotloop-{self._name}", daemon=True)
            self._thread.start()
        elif view.event == "epoch":
            record = view.history[-1]
            figures = {key: value for key, value in record.flat().items() if key != "step"}
            self._add(record.step, finite(figures))
        elif view.event == "stop":
            self._reason = view.reason
        elif view.event == "final":
            figures = {key: value for key, value in (view.final or {}).items() if key.startswith("test_")}
            self._add(view.step, finite(figures), is_final=True)

    def _add(self, step: int, figures: dict[str, float], is_final: bool = False) -> None:
        if (is_final or step > self._sent) and figures:
            with self._news:
                self._rows.append((step, figures))
                self._news.notify()

    def _send_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(self._has_news, timeout=self._retry_s)
                is_last = self._is_closing
            try:
                self._send()
                if is_last and self._is_open and not self._rows:
                    self._adapter.close(self._reason)
                self._retry_s = None
            except BaseException as error:  # libraries also raise SystemExit; a logger never ends a training
                self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s) if self._retry_s else _FIRST_RETRY_S
                if not self._has_failed:
                    self._has_failed = True
                    first = str(error).strip().splitlines()[:1]
                    reason = f"{type(error).__name__}: {''.join(first)[:200]}"
                    self._say(f"{self._name} failed ({reason}); training goes on, and its figures are sent later")
            if is_last:
                return

    def _has_news(self) -> bool:
        return self._is_closing or (bool(self._rows) and self._retry_s is None)

    def _send(self) -> None:
        if not self._is_open and (self._rows or not self._id):
            self._id = self._adapter.open(self._run, self._settings, self._id)
            self._is_open = True
            self._store()
        while self._rows:
            step, figures = self._rows[0]
            self._adapter.log(step, figures)
            self._sent = step
            self._rows.popleft()
            self._store()

    def _store(self) -> None:
        with _FILE_LOCK:
            known = _read(self._path)
            known[self._name] = {"id": self._id, "step": self._sent}
            write_atomic(self._path, json.dumps(known, indent=2))


_FILE_LOCK = threading.Lock()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
