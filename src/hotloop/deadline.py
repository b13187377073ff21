"""When work must be over: what would take longer is not begun, and what takes longer than estimated is ended."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hotloop.alarm import at_most
from hotloop.errors import TimeOverError

SEARCHED = 1 / 3
"""Of the time until a run is to stop, at most; the rest is for training."""

GRACE_S = 2.0
"""After the deadline, in which what was ended is put away."""

_LEAST_S = 1.0
"""Each piece of work has at least this long: a limit of milliseconds bounds a command within seconds."""


@dataclass
class Deadline:
    """When work is to be over.

    Attributes:
        at: by `time.monotonic()`.
        met: whether anything was left out, or had less time, because of it.
        of: which time it is that ends.
    """

    at: float = math.inf
    met: bool = False
    of: str = "of the third of the time until stop-after that a search may take"

    @classmethod
    def before(cls, until: float, limit_at: float = math.inf) -> Deadline:
        """That of a search which begins now, where the run is to stop at `until`, by `time.monotonic()`.

        Args:
            limit_at: when the search itself is to be over, as the user says.
        """
        now = time.monotonic()
        own = cls(now + SEARCHED * (until - now))
        return own if own.at <= limit_at else cls(limit_at, of="of the time limit")

    @classmethod
    def of_limit(cls, limit_s: float | None, began: float | None = None) -> Deadline:
        """That of a time limit in seconds; None is no limit. `began`, by `time.monotonic()`, is now by default."""
        if limit_s is None:
            return cls(of="of the time limit")
        return cls((time.monotonic() if began is None else began) + limit_s, of="of the time limit")

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        allowed = seconds <= self.left_s
        self.met |= not allowed
        return allowed

    def part(self, share: float) -> Deadline:
        """The deadline of a piece of the work that may take a share of what is left."""
        return self if math.isinf(self.at) else Deadline(self.at - (1 - share) * max(0.0, self.left_s), of=self.of)

    @contextmanager
    def enforced(self, what: str, *, reserve_s: float = 0.0) -> Iterator[None]:
        """Ends the work within it once no more than `reserve_s` seconds are left.

        Args:
            what: the work, for the message, such as `its proof`.

        Raises:
            TimeOverError: the work was ended.
        """
        if math.isinf(self.at):
            yield
            return

        def over() -> TimeOverError:
            self.met = True
            return TimeOverError(
                f"{what} was ended: {self}", expected="work that fits into the time", fix="give it more time"
            )

        with at_most(max(_LEAST_S, self.left_s - reserve_s), over):
            yield

    def __str__(self) -> str:
        return f"{max(0.0, self.left_s):.0f} s are left {self.of}"
