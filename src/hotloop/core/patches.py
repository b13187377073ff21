"""Replaces attributes for a limited time, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


class Patches:
    """The attributes that are replaced now."""

    def __init__(self) -> None:
        self._patched: list[tuple[Any, str, Any, Any]] = []

    def patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces `owner.name` by `make(old value)`; `undo` makes an inherited attribute inherited again."""
        before = vars(owner).get(name, _MISSING)
        value = make(getattr(owner, name) if before is _MISSING else before)
        self._patched.append((owner, name, before, value))
        _set_attribute(owner, name, value)

    @property
    def is_untouched(self) -> bool:
        """Whether every replaced attribute still has the patch's value."""
        return all(vars(owner).get(name) is value for owner, name, _, value in self._patched)

    def undo(self) -> None:
        """Restores the attributes, except those that other code has replaced since."""
        while self._patched:
            owner, name, before, value = self._patched.pop()
            if vars(owner).get(name) is not value:
                continue
            if before is _MISSING:
                (delattr if isinstance(owner, type) else object.__delattr__)(owner, name)
            else:
                _set_attribute(owner, name, before)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    """Sets the attribute of the owner itself: a wrapper's `__setattr__` may forward to the wrapped object."""
    (setattr if isinstance(owner, type) else object.__setattr__)(owner, name, value)


@contextmanager
def patch_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces `owner.name` by `make(old value)` within the context."""
    patches = Patches()
    patches.patch(owner, name, make)
    try:
        yield
    finally:
        patches.undo()
