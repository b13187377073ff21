"""Room on the stack for functions that stand around others: what fits alone fits beside them."""

from __future__ import annotations

import sys
from contextlib import suppress

_MOST = 2**31 - 1


class Rooms:
    """Those of this process, in whatever order they are given back.

    Attributes:
        made: how many there are.
        before: the limit without any.
        mine: as it was set last.
    """

    def __init__(self) -> None:
        self.made, self.before, self.mine = 0, 0, 0

    def change(self, by: int) -> None:
        """A limit that the script has set meanwhile is the one that goes for it."""
        now = sys.getrecursionlimit()
        if not self.made or now != self.mine:
            self.before = now
        self.made += by
        self.mine = min(self.before + self.made * (self.before // 2), _MOST)
        with suppress(RecursionError):  # calls are nested deeper by now
            sys.setrecursionlimit(self.mine)


_ROOMS = Rooms()


class Room:
    """Lets calls nest half as deep again while it is made."""

    def __init__(self) -> None:
        self._made = False

    def make(self) -> None:
        if not self._made:
            self._made = True
            _ROOMS.change(1)

    def give_back(self) -> None:
        if self._made:
            self._made = False
            _ROOMS.change(-1)
