"""Replaces attributes for a while, and puts them back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


class Patches:
    """Attributes that are replaced now."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces `owner.name` by `make(what it was)`; what is inherited is inherited again afterwards."""
        before = vars(owner).get(name, _MISSING)
        mine = make(getattr(owner, name) if before is _MISSING else before)
        self._put.append((owner, name, before, mine))
        _set_attribute(owner, name, mine)

    @property
    def is_untouched(self) -> bool:
        """Whether what was put is still there, and nobody has put anything else in its place."""
        return all(vars(owner).get(name) is mine for owner, name, _, mine in self._put)

    def undo(self) -> None:
        """Puts everything back; what somebody else has replaced since is left alone."""
        while self._put:
            owner, name, before, mine = self._put.pop()
            if vars(owner).get(name) is not mine:
                continue
            if before is _MISSING:
                _delete_attribute(owner, name)
            else:
                _set_attribute(owner, name, before)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    """On the owner itself: what stands around another object, as around a stream, may hand its attributes on to that one."""
    (setattr if isinstance(owner, type) else object.__setattr__)(owner, name, value)


def _delete_attribute(owner: Any, name: str) -> None:
    (delattr if isinstance(owner, type) else object.__delattr__)(owner, name)


@contextmanager
def patch_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Meanwhile `owner.name` is `make(what it was)`."""
    patches = Patches()
    patches.patch(owner, name, make)
    try:
        yield
    finally:
        patches.undo()
