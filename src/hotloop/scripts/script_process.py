"""Runs a script in a process of its own, as it would run alone, and reads the result of hotloop's code inside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hotloop.core.processes import STOP_SIGNALS, signal_handlers
from hotloop.errors import TaskError
from hotloop.scripts.child import mark_stop

_INJECT = Path(__file__).parent / "inject"
GRACE_S = 60.0
"""Seconds after each signal, before a stronger one: a script may save or evaluate after Ctrl-C."""

_OTHER_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM") if hasattr(signal, name)
)
"""Signals besides `STOP_SIGNALS` that other processes send, such as a cluster's scheduler before a time limit."""

_SENT_BY_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))


@dataclass(frozen=True)
class ScriptEnd:
    """The end of a script.

    Attributes:
        exit_code: of its process, as in `subprocess`.
        stopped: a line if the script was stopped at its time limit, else empty.
        seconds: from start to end.
        result: the last result of `write_result`; None without a result.
    """

    exit_code: int
    stopped: str
    seconds: float
    result: dict[str, Any] | None


def run_script(
    path: Path | str,
    arguments: Sequence[str] = (),
    *,
    inside: str,
    settings: dict[str, Any],
    stop_after_s: float | None = None,
    stdout: int | None = None,
    interpreter_options: Sequence[str] = (),
) -> ScriptEnd:
    """Runs a script to its end.

    The script gets its arguments, and this process's standard input, output and error. Signals are passed on.

    Args:
        path: the script's file; or, as text, the name of a module to run as `python -m` does.
        inside: a hotloop function, `module:name`, called in the script's process before the script starts.
        settings: JSON values for that function, which also gets `out`, the file for `write_result`.
        stop_after_s: seconds after which the script is stopped by Ctrl-C; by SIGTERM if it still runs after `GRACE_S`.
        stdout: file descriptor of the script's output, such as 2 for standard error; None for this process's output.
        interpreter_options: options of Python itself, such as `-u`.

    Raises:
        TaskError: the file doesn't exist.
    """
    if isinstance(path, Path) and not path.is_file():
        raise TaskError(f"there is no file {path}", expected="a Python script", fix="check the path")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hotloop-") as folder:
        out = Path(folder) / "result.json"
        named = [str(path)] if isinstance(path, Path) else ["-m", path]
        command = [sys.executable, *interpreter_options, *named, *arguments]
        environment = _environment({**settings, "inside": inside, "out": str(out)})
        process = subprocess.Popen(command, env=environment, stdout=stdout)
        with _forward_signals(process):
            stopped = _wait(process, stop_after_s, str(out))
        result = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None
    return ScriptEnd(process.returncode, stopped, time.monotonic() - began, result)


def _environment(settings: dict[str, Any]) -> dict[str, str]:
    """This process's environment with the settings that `inject/sitecustomize.py` reads and removes."""
    path = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = settings | {"root": str(Path(__file__).parents[2]), "parent": os.getpid()}
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path), "HOTLOOP_SCRIPT": json.dumps(settings)}


def _wait(process: subprocess.Popen, stop_after_s: float | None, out: str) -> str:
    try:
        process.wait(stop_after_s)
        return ""
    except subprocess.TimeoutExpired:
        pass
    mark_stop(out)
    line = f"the script was stopped after {stop_after_s:g} s, as asked for"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        _send_signal(process, number)
        try:
            process.wait(GRACE_S)
            break
        except subprocess.TimeoutExpired:
            line += f"; it went on for {GRACE_S:g} s after {number.name}"
    return line


def _send_signal(process: subprocess.Popen, number: signal.Signals) -> None:
    """Signals the script and its child processes of the same group, as a terminal does on Ctrl-C."""
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)  # unknown after the script's end
    group = [child for child in children if _process_group(child.pid) == _process_group(process.pid)]
    process.send_signal(number)
    for child in group:
        with suppress(psutil.Error):
            child.send_signal(number)


def _process_group(pid: int) -> int | None:
    """None if there is no such process, or no groups on this system."""
    try:
        return os.getpgid(pid)
    except (OSError, AttributeError):
        return None


@contextmanager
def _forward_signals(process: subprocess.Popen) -> Iterator[None]:
    """Passes signals on to the script; in the main thread only, as Python's signals require."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number not in _SENT_BY_TERMINAL or not _is_in_foreground():
            process.send_signal(number)

    with signal_handlers(forward, *STOP_SIGNALS, *_OTHER_SIGNALS):
        yield


def _is_in_foreground() -> bool:
    """Whether the terminal sends its Ctrl-C to the script as well."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except (OSError, AttributeError):  # no terminal, or Windows
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
