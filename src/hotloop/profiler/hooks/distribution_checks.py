"""Argument validation of torch.distributions: its lines and its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributions import Distribution

from hotloop.core.patches import Patches
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.hooks.torch_hooks import with_callbacks

ARGUMENT_VALIDATION = "argument validation"

_VALIDATING_METHODS = ("__init__", "_validate_sample")
"""Methods of the base class: `__init__` mainly validates, torch calls `_validate_sample` only to validate."""


class ValidationTimer:
    """Times argument validation between `listen` and `stop`; `note` receives the line and CPU seconds of each."""

    def __init__(self, sites: CallSites, mine: Callable[[], bool], note: Callable[[str, float], None]) -> None:
        self._sites, self._mine, self._note = sites, mine, note
        self._patches, self._depth = Patches(), 0

    def listen(self) -> None:
        self._depth = 0
        for name in _VALIDATING_METHODS:
            self._patches.patch(Distribution, name, with_callbacks(self._mine, self._began, self._ended))

    def stop(self) -> None:
        self._patches.undo()

    def _began(self, args: tuple, kwargs: dict) -> float:
        self._depth += 1
        return time.thread_time()

    def _ended(self, began: float, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and args[0]._validate_args:
            self._note(self._sites.caller_line(3), time.thread_time() - began)
