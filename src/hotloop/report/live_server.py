"""Serves a live page of runs on this machine: read-only, with a token in the address, through server-sent events.

The server reads run folders, again when their files change; it executes nothing in them and writes nothing.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hotloop.core.files.run_folder import StoredRun, find_runs, is_alive, read_status
from hotloop.errors import HotloopError, RunError, describe_error
from hotloop.report.blocks import plotly_script, render
from hotloop.report.run_curves import overlaid_figures, run_figures
from hotloop.report.run_list import run_row

LOOPBACK = "127.0.0.1"

HEARTBEAT_S = 5.0

IDLE_S = 60.0
"""Seconds without a page and without a training after which a server ends."""

_POLL_S = 0.25

_MAX_STREAMS = 32

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}

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


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Returns a listening socket; port 0 is a free port.

    Raises:
        RunError: the port is taken, or the host isn't this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"the page can't be served on {host}:{port} ({reason})",
            expected="a free port of this machine",
            fix="choose another port, or leave the port out",
        ) from error


def page_address(listener: socket.socket, token: str) -> str:
    """Returns the address for a browser; the token is the permission to read."""
    host, port = listener.getsockname()[:2]
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/?token={token}"


def new_token() -> str:
    return secrets.token_urlsafe(18)


class LiveServer(ThreadingHTTPServer):
    """Serves the runs in `folder` on a listening socket until nobody needs the page.

    Args:
        idle_s: see IDLE_S.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, token: str, folder: Path, idle_s: float = IDLE_S) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.token, self.runs, self.idle_s = token, LiveRuns(folder), idle_s
        self.streams = 0
        self._lock = threading.Lock()
        host, port = listener.getsockname()[:2]
        self._is_loopback = ipaddress.ip_address(host).is_loopback
        self._port = port

    def serve(self) -> None:
        """Answers requests until no run trains and no page is open for `idle_s` seconds."""
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True).start()
        needed = time.monotonic()
        try:
            while time.monotonic() - needed < self.idle_s:
                time.sleep(_POLL_S)
                if self.streams or self.runs.is_training():
                    needed = time.monotonic()
        finally:
            self.shutdown()
            self.server_close()

    @contextmanager
    def stream(self) -> Iterator[bool]:
        """Counts an open page; yields False if there are too many."""
        with self._lock:
            is_allowed = self.streams < _MAX_STREAMS
            self.streams += is_allowed
        try:
            yield is_allowed
        finally:
            with self._lock:
                self.streams -= is_allowed

    def allows_host(self, header: str) -> bool:
        """Returns whether a Host header names this machine: another name may be of a foreign page (DNS rebinding)."""
        try:
            parts = urlsplit(f"//{header}")
            name, port = parts.hostname or "", parts.port
        except ValueError:
            return False
        if (port or 80) != self._port:
            return False
        if name == "localhost":
            return True
        with suppress(ValueError):
            address = ipaddress.ip_address(name)
            return address.is_loopback or not self._is_loopback
        return not self._is_loopback and name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that is closed during an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "hotloop", ""
    timeout = 30

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if not self.server.allows_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for another host")
        elif not hmac.compare_digest(query.get("token", [""])[0].encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the address lacks the right token: use the one that hotloop printed")
        elif parts.path == "/":
            page = render("live.html.j2", title="hotloop", token=self.server.token)
            self._answer(page, "text/html")
        elif parts.path == "/plotly.js":
            self._answer(plotly_script(), "text/javascript")
        elif parts.path == "/events":
            self._stream_events()
        elif parts.path == "/report":
            self._report(query.get("run", [""])[0])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _report(self, name: str) -> None:
        from hotloop.report.run_report import run_report

        try:
            page = run_report(self.server.runs.read(name))
        except HotloopError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except Exception as error:  # files that were changed by hand; the live page goes on
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"no report of this run: {describe_error(error)}")
        else:
            self._answer(page, "text/html")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._answer(reason + "\n", "text/plain", status)

    def _answer(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self._start(status, f"{kind}; charset=utf-8", {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _start(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _stream_events(self) -> None:
        with self.server.stream() as is_allowed:
            if not is_allowed:
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many open pages")
                return
            self._start(HTTPStatus.OK, "text/event-stream", {"X-Accel-Buffering": "no"})
            with suppress(OSError):
                self._send_events()

    def _send_events(self) -> None:
        sent, sent_at = -1, -HEARTBEAT_S
        self.wfile.write(b"retry: 1000\n\n")
        while not self._is_closed():
            version, snapshot = self.server.runs.snapshot()
            if version != sent:
                self.wfile.write(b"event: runs\ndata: " + json.dumps(snapshot).encode() + b"\n\n")
                sent, sent_at = version, time.monotonic()
            elif time.monotonic() - sent_at >= HEARTBEAT_S:
                self.wfile.write(b"event: heartbeat\ndata: {}\n\n")
                sent_at = time.monotonic()
            self.wfile.flush()

    def _is_closed(self) -> bool:
        """Waits a moment; returns whether the browser closed the connection meanwhile."""
        readable, _, _ = select.select([self.connection], [], [], _POLL_S)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
