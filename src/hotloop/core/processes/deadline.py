"""Deadlines of work: work that would exceed a deadline is skipped, and work that exceeds it is ended."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hotloop.core.processes.signals import time_limit
from hotloop.errors import TimeOverError

SEARCH_SHARE = 1 / 3
"""Largest share of the time until a run's stop that a search may use."""

GRACE_S = 2.0
"""Seconds after a deadline for the cleanup of ended work."""

_MIN_S = 1.0
"""Shortest time of one piece of work, in seconds: a limit of milliseconds ends a command within seconds."""


@dataclass
class Deadline:
    """A point in time at which work must end.

    Attributes:
        at: the deadline, in seconds of `time.monotonic()`.
        is_met: whether the deadline skipped or shortened work.
        from_seconds: the origin of the time in messages.
    """

    at: float = math.inf
    is_met: bool = False
    from_seconds: str = "of the third of the time until stop-after that a search may take"

    @classmethod
    def minus(cls, until: float, limit_at: float = math.inf) -> Deadline:
        """Returns the deadline of a search that begins now.

        Args:
            until: the run's stop, in seconds of `time.monotonic()`.
            limit_at: the user's own limit of the search, in seconds of `time.monotonic()`.
        """
        now = time.monotonic()
        own = cls(now + SEARCH_SHARE * (until - now))
        return own if own.at <= limit_at else cls(limit_at, from_seconds="of the time limit")

    @classmethod
    def from_limit(cls, limit_s: float | None, began: float | None = None) -> Deadline:
        """Returns the deadline of a time limit; None is no limit.

        Args:
            began: start of the work, in seconds of `time.monotonic()`; None is now.
        """
        if limit_s is None:
            return cls(from_seconds="of the time limit")
        return cls((time.monotonic() if began is None else began) + limit_s, from_seconds="of the time limit")

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()

    def has_time_for(self, seconds: float) -> bool:
        """Returns whether so many seconds remain; sets `is_met` if not."""
        allowed = seconds <= self.left_s
        self.is_met |= not allowed
        return allowed

    def fraction(self, share: float) -> Deadline:
        """Returns the deadline of a piece of work that may use a share of the remaining time."""
        if math.isinf(self.at):
            return self
        return Deadline(self.at - (1 - share) * max(0.0, self.left_s), from_seconds=self.from_seconds)

    @contextmanager
    def enforce(self, what: str, *, reserve_s: float = 0.0) -> Iterator[None]:
        """Ends the work within the context when only `reserve_s` seconds remain.

        Args:
            what: the work's name in the message, such as `its proof`.

        Raises:
            TimeOverError: the deadline ended the work.
        """
        if math.isinf(self.at):
            yield
            return

        def timeout_error() -> TimeOverError:
            self.is_met = True
            return TimeOverError(
                f"{what} was ended: {self}", expected="work that fits into the time", fix="give it more time"
            )

        with time_limit(max(_MIN_S, self.left_s - reserve_s), timeout_error):
            yield

    def __str__(self) -> str:
        return f"{max(0.0, self.left_s):.0f} s are left {self.from_seconds}"
