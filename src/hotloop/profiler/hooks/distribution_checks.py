"""Argument validation of torch.distributions: its lines and its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributions import Distribution

from hotloop.core.patches import Patches
from hotloop.profiler.base.call_sites import Sites
from hotloop.profiler.hooks.torch_hooks import around

WHAT = "argument validation"

_CHECKING = ("__init__", "_validate_sample")
"""Methods of the base class. `__init__` mainly validates, and torch calls `_validate_sample` only for validation."""


class Validations:
    """Measures the time of argument validation between `listen` and `stop`.

    Args:
        note: receives the line and the CPU seconds of each validation.
    """

    def __init__(self, sites: Sites, mine: Callable[[], bool], note: Callable[[str, float], None]) -> None:
        self._sites, self._mine, self._note = sites, mine, note
        self._patches, self._depth = Patches(), 0

    def listen(self) -> None:
        self._depth = 0
        for name in _CHECKING:
            self._patches.put(Distribution, name, around(self._mine, self._began, self._ended))

    def stop(self) -> None:
        self._patches.undo()

    def _began(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.thread_time()

    def _ended(self, began: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and args[0]._validate_args:
            self._note(self._sites.caller(3), time.thread_time() - began)
