"""Processes of peers, one at a time: each trains when it is ordered to, and waits while the others do."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.speed.caching import Filled

ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """A peer's process ended, or took longer than it may; the text says which."""


@dataclass
class Marked:
    """What a peer's process said of itself.

    Attributes:
        startup_s: from the process's start to the end of its first step.
        start_peak_bytes: the most memory it held until then.
        cache: `cold`, `half-warm` or `warm`, of a peer that keeps what it compiled; see `caching.py`.
        first_start: the start that filled its cache, before it was measured.
        unsearched: why there was none, and it runs what needs none.
        windows: steps and seconds of each window that counts.
        steps: trained in all.
        peak_bytes: the most memory it held until training ended.
        train_loss, test_accuracy: of what it trained.
        total_s: of the process, start to end of training; only where it was undisturbed.
        plan: what hotloop ran, in brief.
        said: what it told.
        failure: why there are no figures, or none after those that there are.
    """

    startup_s: float | None = None
    windows: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    peak_bytes: int | None = None
    train_loss: float | None = None
    test_accuracy: float | None = None
    total_s: float | None = None
    plan: str | None = None
    said: list[str] = field(default_factory=list)
    failure: str | None = None
    cache: str | None = None
    first_start: Filled | None = None
    unsearched: str = ""
    start_peak_bytes: int | None = None


class Peer:
    """A peer's process.

    Attributes:
        done: steps trained in all, as of its last report.
        last: steps and seconds of its last window.

    Args:
        command: without the descriptors for orders and reports, which are added.
        environment: on top of this process's own.
        in_turns: whether it waits for orders; else it trains to the end of its epochs.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, in_turns: bool = True) -> None:
        self.marked = Marked()
        theirs, self._orders = os.pipe()
        self._reports, reporting = os.pipe()
        orders = ["--orders", str(theirs)] if in_turns else []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *orders, "--reports", str(reporting)],
            env={**os.environ, **environment},
            cwd=ROOT,
            pass_fds=[theirs, reporting],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(reporting)
        self._rest = b""
        self.done = 0
        self.last = (0, 0.0)

    def begin(self, limit_s: float) -> None:
        """Waits for the end of the first step."""
        first = self._until("first", limit_s)
        self.marked.startup_s, self.marked.start_peak_bytes = first["at"] - self._began, first["peak_bytes"]
        self.done = first["done"]

    def window(self, steps: int, limit_s: float) -> tuple[int, float]:
        """Has it train so many steps; what it did, and the seconds that took."""
        return self._trained({"steps": steps}, limit_s)

    def catch_up(self, steps: int, limit_s: float) -> None:
        """Has it train until it has done so many in all."""
        self._trained({"until": steps}, limit_s)

    def _trained(self, order: dict[str, Any], limit_s: float) -> tuple[int, float]:
        self._order(order)
        found = self._until("window", limit_s)
        self.done, self.last = found["done"], (int(found["steps"]), float(found["seconds"]))
        return self.last

    def end(self, limit_s: float, *, ordered: bool = True) -> None:
        """Ends training, and reads what came of it."""
        if ordered:
            self._order({})
        trained = self._until("trained", limit_s)
        self.marked.steps, self.marked.peak_bytes = trained["steps"], trained["peak_bytes"]
        if not ordered:
            self.marked.total_s = trained["at"] - self._began
        judged = self._until("evaluated", limit_s)
        self.marked.train_loss, self.marked.test_accuracy = judged["train_loss"], judged["test_accuracy"]
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._orders)
        os.close(self._reports)
        self._log.close()

    def _order(self, order: dict[str, Any]) -> None:
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise Failed(self._ended()) from None

    def _until(self, event: str, limit_s: float) -> dict[str, Any]:
        """The next report of that kind; what else it says on the way is kept."""
        until = time.monotonic() + limit_s
        while True:
            line = self._line(until)
            if line is None:
                raise Failed(f"not done with {_DOING[event]} within {limit_s:.0f} s")
            found = json.loads(line)
            if found["event"] == event:
                return found
            if found["event"] == "plan":
                self.marked.plan = found["brief"]
            elif found["event"] == "said":
                self.marked.said.append(found["line"])

    def _line(self, until: float) -> bytes | None:
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._reports], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._reports, 65536)
            if not piece:
                raise Failed(self._ended())
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self) -> str:
        try:
            self.process.wait(_GONE_S)
            how = f"ended with {self.process.returncode}"
        except subprocess.TimeoutExpired:
            self.kill()
            how = "said goodbye and didn't end"
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{how}: {lines[-1][:300] if lines else 'without a word'}"


_GONE_S = 5.0
"""What a process may take to end after it closed its pipes."""

_DOING = {
    "first": "its first step",
    "window": "a window of steps",
    "trained": "training",
    "evaluated": "evaluating",
}


def command(module: str, workload: str, options: Sequence[str], epochs: int, device: str) -> list[str]:
    """A peer's script."""
    script = [sys.executable, "-m", f"bench.peers.{module}", workload, *options]
    return [*script, "--epochs", str(epochs), "--device", device]
