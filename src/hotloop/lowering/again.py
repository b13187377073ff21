"""Whether a step still does what was compiled, where callbacks may have changed what it reads beside its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from hotloop.errors import PlanError
from hotloop.lowering.capture import Captured
from hotloop.lowering.constants import contents_of


class Again:
    """What a step did when it was captured, to be held against what it does when it is due.

    Args:
        captured: before anything is rewritten in it.
        trace: captures the step anew, on such a batch.

    Attributes:
        due: whether to look before the next step.
    """

    def __init__(self, captured: Captured, trace: Callable[[Any], Captured]) -> None:
        self._before, self._trace = _told_apart(captured), trace
        self.due = False

    def differs(self, batch: Any) -> bool:
        """Looks where that is due, which takes as long as one trace; False elsewhere."""
        if not self.due:
            return False
        self.due = False
        try:
            return _told_apart(self._trace(batch)) != self._before
        except PlanError:  # it can't be captured any more
            return True


def any_of_users(callbacks: Iterable[Any]) -> bool:
    """Whether one of them may change what is trained: it is not hotloop's own, such as a progress bar, nor does it say
    `read_only = True` of itself."""
    return any(not (_of_hotloop(one) or getattr(one, "read_only", False) is True) for one in callbacks)


def _of_hotloop(callback: Any) -> bool:
    return str(getattr(callback, "__module__", "")).startswith("hotloop.")


def looks(watched: bool, steps: int | None, batches: int | None) -> int:
    """How often a run of so many steps sees whether callbacks have changed what was compiled: once in an epoch."""
    return math.ceil(steps / batches) if watched and steps and batches else 0


def _told_apart(captured: Captured) -> tuple[Any, ...]:
    return captured.graph.code, contents_of(captured.graph), captured.scalars, captured.gradients
