"""Runs a script in a process of its own, as it would run alone, and reads what hotloop's code inside left of it."""

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

from hotloop.core.processes.signals import STOP_SIGNALS, signal_handlers
from hotloop.errors import TaskError

_INJECT = Path(__file__).parent / "inject"
GRACE_S = 60.0
"""After each signal, before a stronger one: a script may save or evaluate when it hears Ctrl-C."""


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended.

    Attributes:
        exit_code: of its process, as `subprocess` gives it.
        stopped: a line if it was stopped because its time was up, else empty.
        seconds: from its start to its end.
        result: what the code inside wrote last by `write_result`; None if it wrote nothing.
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
) -> ScriptEnd:
    """Runs a script to its end.

    The script gets its own arguments, and the standard input, output and error of this process. Ctrl-C and SIGTERM go
    to the script.

    Args:
        path: of its file; or, as text, the name of a module to run as `python -m` does.
        inside: a function of hotloop's, `module:name`, called in the script's process before the script starts.
        settings: values of JSON for that function, which also gets `out`, the file for `write_result`.
        stop_after_s: seconds after which the script is stopped, as by Ctrl-C; by SIGTERM if it goes on for `GRACE_S`.
        stdout: where its output goes, such as 2 for standard error; this process's if None.

    Raises:
        TaskError: there is no such file.
    """
    if isinstance(path, Path) and not path.is_file():
        raise TaskError(f"there is no file {path}", expected="a Python script", fix="check the path")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hotloop-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, *([str(path)] if isinstance(path, Path) else ["-m", path]), *arguments]
        environment = _environment({**settings, "inside": inside, "out": str(out)})
        process = subprocess.Popen(command, env=environment, stdout=stdout)
        with _forward_signals(process):
            stopped = _wait(process, stop_after_s)
        result = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None
    return ScriptEnd(process.returncode, stopped, time.monotonic() - began, result)


def _environment(settings: dict[str, Any]) -> dict[str, str]:
    """This process's, with what `inject/sitecustomize.py` looks for; it takes that out again."""
    own = dict(os.environ)
    path = [str(_INJECT), own["PYTHONPATH"]] if own.get("PYTHONPATH") else [str(_INJECT)]
    settings = settings | {"root": str(Path(__file__).parents[2]), "parent": os.getpid()}
    return own | {"PYTHONPATH": os.pathsep.join(path), "HOTLOOP_SCRIPT": json.dumps(settings)}


def _wait(process: subprocess.Popen, stop_after_s: float | None) -> str:
    """Waits for the script's end; stops it when its time is up, and says so then."""
    try:
        process.wait(stop_after_s)
        return ""
    except subprocess.TimeoutExpired:
        pass
    said = f"the script was stopped after {stop_after_s:g} s, as asked for"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        _send_signal(process, number)
        try:
            process.wait(GRACE_S)
            break
        except subprocess.TimeoutExpired:
            said += f"; it went on for {GRACE_S:g} s after {number.name}"
    return said


def _send_signal(process: subprocess.Popen, number: signal.Signals) -> None:
    """To the script and to the processes that it has started, as a terminal sends Ctrl-C to its whole group."""
    started: list[psutil.Process] = []
    with suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)  # nobody knows them once the script has ended
    together = [one for one in started if _process_group(one.pid) == _process_group(process.pid)]
    process.send_signal(number)
    for one in together:
        with suppress(psutil.Error):
            one.send_signal(number)


def _process_group(pid: int) -> int | None:
    """Of processes; None where there is none, or no such process any more."""
    try:
        return os.getpgid(pid)
    except (OSError, AttributeError):
        return None


@contextmanager
def _forward_signals(process: subprocess.Popen) -> Iterator[None]:
    """Hands Ctrl-C and SIGTERM on to the script, and goes on waiting for it; in the main thread alone, as signals go."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not _is_in_foreground():
            process.send_signal(number)

    with signal_handlers(hand_on, *STOP_SIGNALS):
        yield


def _is_in_foreground() -> bool:
    """Whether the terminal sends its Ctrl-C to the script as well, wherever standard input comes from."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except (OSError, AttributeError):  # there is none; Windows has no such function
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
