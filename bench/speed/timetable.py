"""How a bench of limited time is shared out: everybody's windows first, and then, in order, the searches that fit."""

from __future__ import annotations

import time
from collections.abc import Mapping

_MOST = 1.5
"""Times its share that a workload's session may take of what others have left over."""

_ROOM = 1.3
"""Times what the searches to come are reckoned at that a session leaves to them: a machine may be slower than usual."""


class Timetable:
    """Of one bench, from now on.

    Args:
        seconds: for everything; None where there is no such limit.
        windows_s: what each workload's session is reckoned at, in the order in which they are measured.
        searches_s: what the searches before it are reckoned at, by workload and peer.
    """

    def __init__(
        self, seconds: float | None, windows_s: Mapping[str, float], searches_s: Mapping[tuple[str, str], float]
    ) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self._order, self._windows_s = list(windows_s), dict(windows_s)
        self._searches_s = dict(searches_s)
        self.left_out: dict[tuple[str, str], float] = {}
        """Searches that don't fit, with what they are reckoned at."""
        if seconds is not None:
            spare_s = seconds - sum(windows_s.values())
            for key, needs_s in searches_s.items():
                if needs_s > spare_s:
                    self.left_out[key] = self._searches_s.pop(key)
                else:
                    spare_s -= needs_s

    def search_s(self, workload: str, peer: str) -> float | None:
        """Seconds that this search may take now, so that all that comes after it has its own; None without a limit."""
        self._searches_s.pop((workload, peer), None)
        return self._left_s(self._order[self._order.index(workload) :])

    def session_s(self, workload: str) -> float:
        """Seconds that its session may take now."""
        own_s = self._windows_s[workload]
        left_s = self._left_s(self._order[self._order.index(workload) + 1 :], _ROOM)
        return own_s if left_s is None else max(0.0, min(left_s, _MOST * own_s))

    def _left_s(self, later: list[str], room: float = 1.0) -> float | None:
        """Until the end, without what such workloads' sessions, and the searches that are still to come, are reckoned at."""
        if self._until is None:
            return None
        kept_s = sum(self._windows_s[name] for name in later) + room * sum(self._searches_s.values())
        return self._until - time.monotonic() - kept_s
