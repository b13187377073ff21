"""Replaces attributes for a while, and puts them back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that are replaced now."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces `owner.name` by `make(what it was)`; what is inherited is inherited again afterwards."""
        before = vars(owner).get(name, _ABSENT)
        mine = make(getattr(owner, name) if before is _ABSENT else before)
        self._put.append((owner, name, before, mine))
        setattr(owner, name, mine)

    def undo(self) -> None:
        """Puts everything back; what somebody else has replaced since is left alone."""
        while self._put:
            owner, name, before, mine = self._put.pop()
            if vars(owner).get(name) is not mine:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
