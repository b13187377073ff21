"""The runner's side of a check's process: gives orders, waits for reports, and ends what takes too long."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.gpu.setting import ROOT, Setting, environment

_TRACES_S = 1.0
"""What a process may take to write where its threads stand."""

_LOOK_S = 0.5
"""How often a silent process is checked."""


@dataclass(frozen=True)
class Ended:
    """How a part ended.

    Attributes:
        status: `passed`, `failed`, `skipped`, or `late` where it reached its time limit.
        output: what the part and the processes that it started printed.
    """

    status: str
    figure: str
    seconds: float
    figures: Mapping[str, Any]
    output: str


class Child:
    """The process of one check.

    Args:
        module: of the check.
        log: file for what it prints.
    """

    def __init__(self, module: str, setting: Setting, log: Path) -> None:
        self.module, self._log = module, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._reports, reporting = os.pipe()
        options = ["--rehearse"] if setting.is_rehearsal else []
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "bench.gpu.child", module, *options, "--device", setting.device]
                + ["--scratch", str(setting.scratch), "--reports", str(reporting)],
                cwd=ROOT,
                env=environment(setting.scratch / "cache", is_rehearsal=setting.is_rehearsal),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[reporting],
                start_new_session=True,
            )
        os.close(reporting)
        self._rest = b""
        self._seen = 0

    def run(self, part: str, limit_s: float) -> Ended:
        """Runs a part. The process goes on only if the part passed or was skipped; `close` it otherwise."""
        began = time.monotonic()
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{part}\n".encode())
            self._process.stdin.flush()
        report = self._report(began + limit_s)
        seconds = time.monotonic() - began
        if report is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(_TRACES_S)
            return Ended("late", f"not done within {limit_s:.0f} s", seconds, {}, self._printed())
        return Ended(report["status"], report["figure"], seconds, report.get("figures", {}), self._printed())

    def _report(self, until: float) -> dict[str, Any] | None:
        """The next report; None where the time is over."""
        while b"\n" not in self._rest:
            left_s = until - time.monotonic()
            ready, _, _ = select.select([self._reports], [], [], min(_LOOK_S, max(0.0, left_s)))
            if not ready and self._process.poll() is not None:  # a process that it started may keep the pipe open
                return {"status": "failed", "figure": self._death()}
            if not ready and left_s <= 0:
                return None
            if not ready:
                continue
            piece = os.read(self._reports, 65536)
            if not piece:
                return {"status": "failed", "figure": self._death()}
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def _death(self) -> str:
        code = self._process.wait()
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def _printed(self) -> str:
        """What was printed since the last part."""
        with self._log.open("rb") as file:
            file.seek(self._seen)
            found = file.read()
        self._seen += len(found)
        return found.decode(errors="replace")

    def close(self) -> None:
        """Ends the process and all that it started, also what has a session of its own."""
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._reports)
