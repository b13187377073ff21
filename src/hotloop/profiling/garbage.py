"""Python's full garbage collections in the steps that are timed by phases."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median, median_low
from typing import Any

from hotloop.profiling.schedule import Kind
from hotloop.profiling.sites import Sites

_FULL = 2


class Collections:
    """Hears of each on the thread that trains: what it takes, and at which line it falls. Of young objects any loop has some."""

    kinds: Sequence[Kind] = ("instrumented",)

    def __init__(self, sites: Sites) -> None:
        self._sites, self._hears = sites, self._heard
        self._steps: list[tuple[int, float]] = []
        self._spent: Counter[str] = Counter()
        self._many = self._thread = 0
        self._ms = self._began = 0.0

    def begin(self) -> None:
        self._many, self._ms, self._thread = 0, 0.0, threading.get_ident()
        gc.callbacks.append(self._hears)

    def end(self) -> None:
        if self._leave():
            self._steps.append((self._many, self._ms))

    def drop(self) -> None:
        self._leave()

    def close(self) -> None:
        self._leave()

    def _leave(self) -> bool:
        if self._hears not in gc.callbacks:
            return False
        gc.callbacks.remove(self._hears)
        return True

    def _heard(self, what: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread or info["generation"] < _FULL:
            return
        if what == "start":
            self._began = time.perf_counter()
            return
        ms = (time.perf_counter() - self._began) * 1e3
        self._many, self._ms = self._many + 1, self._ms + ms
        self._spent[self._sites.caller()] += ms  # type: ignore[assignment]

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """As `profiles.Habit`, at the line that most of their time fell to; of none, too, so that it takes the place of one."""
        many = median_low([many for many, _ in self._steps]) if self._steps else 0
        if not many:
            return {"collections": []}
        ms, ((where, _),) = median([ms for _, ms in self._steps]), self._spent.most_common(1)
        return {"collections": [{"what": "garbage collection", "where": where, "per_step": float(many), "ms": ms}]}
