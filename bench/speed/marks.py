"""What a peer's process and the bench say to each other: a line of JSON each.

The bench orders `{"steps": n}`; the peer trains so many, and answers with the seconds that they took. `{"until": n}` is the
same up to so many steps in all. Between orders it waits, so that others have the machine. `{}` ends training. Without a bench the peer trains its epochs, undisturbed.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def peak_bytes() -> int:
    """The most memory that this process held.

    On Linux `ru_maxrss` counts what the process that started this one held, too: hence the kernel's own mark first.
    """
    status = Path("/proc/self/status")
    if status.exists() and (mark := re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)):
        return 1024 * int(mark[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Marks:
    """Counts a peer's steps, and reports windows of them.

    Args:
        reports: where lines go.
        orders: where they come from; None to train undisturbed.
        sync: waits until the steps called so far have been computed.
    """

    def __init__(self, reports: TextIO, orders: TextIO | None = None, sync: Callable[[], None] = lambda: None) -> None:
        self.reports, self.orders, self.sync = reports, orders, sync
        self.done = 0
        self.target: float = 1
        self.first_at: float | None = None
        self._began, self._from = 0.0, 0

    @property
    def in_turns(self) -> bool:
        """Whether a bench says when to go on."""
        return self.orders is not None

    def step(self, steps: int = 1) -> bool:
        """Notes steps just called; False when training should end."""
        self.done += steps
        return self.done < self.target or self._reached()

    @property
    def left(self) -> int:
        """Steps until the present window ends; for peers that run several at once. Undisturbed there is no such end."""
        return max(1, int(self.target) - self.done) if self.in_turns else sys.maxsize

    def _reached(self) -> bool:
        self.sync()
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
            self.report(event="first", at=now, done=self.done, peak_bytes=peak_bytes())
        else:
            steps = self.done - self._from
            self.report(event="window", steps=steps, seconds=now - self._began, done=self.done)
        order = self._order()
        if order == {}:
            return False
        # From the last target on, so that a peer that can't stop at each step doesn't run ahead.
        self.target = order.get("until") or self.target + order["steps"]
        self._from, self._began = self.done, time.monotonic()
        return True

    def _order(self) -> dict[str, Any]:
        if self.orders is None:
            return {"steps": float("inf")}
        line = self.orders.readline()
        return json.loads(line) if line else {}

    def report(self, **what: Any) -> None:
        self.reports.write(json.dumps(what) + "\n")
        self.reports.flush()
