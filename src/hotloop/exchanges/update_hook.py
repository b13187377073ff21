"""torch's hook after each optimizer's update: calls a function after an update, or rests for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hotloop.profiler.base.transparency import hide_from_compiler

_UNTIMED_UPDATES = 16
"""Updates of a resting hook between two readings of the clock, unless they take long."""

_LONG_S = 0.01


class UpdateHook:
    """The hook of one session; a resting hook counts updates, which takes a tenth of a microsecond.

    Args:
        ended: receives the optimizer after its update.
    """

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._handle: RemovableHandle | None = None
        self._hook = hide_from_compiler(self._make_hook())
        self.begin_full()

    def begin_full(self) -> None:
        """Calls the function after each update from now on."""
        self._left = self._skipped = 0
        self._until_s = self._began_s = self._timed_s = 0.0

    def install(self) -> None:
        if self._handle is None:
            self.begin_full()
            self._handle = register_optimizer_step_post_hook(self._hook)

    def remove(self) -> None:
        """Removes the hook from torch's table, or leaves an empty function there if torch iterates over later hooks."""
        if self._handle is None:
            return
        table, key = torch_optimizer._global_optimizer_post_hooks, self._handle.id
        if key in table and next(reversed(table)) == key:
            del table[key]
        elif key in table:
            table[key] = _nothing
        self._handle = None

    def rest(self, seconds: float) -> None:
        """Counts updates for a time, instead of calling the function."""
        self._began_s = self._timed_s = time.monotonic()
        self._until_s = self._began_s + seconds

    def rested(self) -> tuple[int, float]:
        """Returns number and seconds of the updates that the hook has only counted since the last call."""
        counted, self._skipped = self._skipped - self._left, self._left
        now_s = time.monotonic()
        seconds, self._began_s = now_s - self._began_s, now_s
        return counted, seconds if counted else 0.0

    def _make_hook(self) -> Callable[[Any, Any, Any], None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._left:
                self._left -= 1
            elif not self._until_s or self._is_over():
                self._ended(optimizer)

        return hook

    def _is_over(self) -> bool:
        """Whether the rest is over; else decides after how many updates this is asked again."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._until_s = 0.0
            return True
        self._skipped += 1
        if now_s - self._timed_s < _LONG_S:
            self._left = _UNTIMED_UPDATES - 1
            self._skipped += self._left
        self._timed_s = now_s
        return False


def _nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Stands in torch's table for a hook that is over."""
