"""What a course of steps asks of those that watch them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hotloop.profiles import Phase
from hotloop.profiling.schedule import Kind


class Observer(Protocol):
    """Watches steps of some kinds more closely; `begin` and `end` are called at their boundaries."""

    kinds: Sequence[Kind]

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def drop(self) -> None:
        """Ends a step that was not like the others, and forgets it."""

    def close(self) -> None: ...
    def records(self) -> dict[str, list[dict[str, Any]]]:
        """Fields of `Facts`."""


class Stage(Protocol):
    """Is told of each step."""

    def begin(self, kind: Kind) -> Phase:
        """A step begins; says what the loop does first."""

    def ready(self) -> None:
        """All that watch it closely have begun."""

    def flags(self) -> list[str]:
        """What has happened in the step that doesn't in every one."""

    def again(self) -> None:
        """The step begins anew: what has happened in it so far is forgotten."""

    def end(self, *, usual: bool = True) -> None:
        """It has ended; whether nothing happened in it but what happens in most."""

    def anew(self) -> None:
        """The script trains in another loop: what was seen of the one before is forgotten."""

    def between(self) -> None:
        """One has ended and the next hasn't begun: what is done here is in neither."""
