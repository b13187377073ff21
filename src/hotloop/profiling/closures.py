"""Closures that optimizers are given, as line searches call them several times in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotloop.profiles import Phase
from hotloop.profiling.hooks import around
from hotloop.profiling.phases import Timeline


class Closures:
    """Puts what a closure does into phases of its own.

    Args:
        mine: whether the thread is watched.
        making: the phase in which batches are made.
        called: is told of each call.
    """

    def __init__(
        self, mine: Callable[[], bool], timeline: Timeline, making: Callable[[], Phase], called: Callable[[], None]
    ) -> None:
        self._timeline, self._making, self._called = timeline, making, called
        self._heard = around(mine, self._began, self._ended)

    def heard(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """What an optimizer's `step` gets in place of its arguments; None for these themselves."""
        optimizer, *given = args
        if given and callable(given[0]):
            return (optimizer, self._heard(given[0]), *given[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._heard(kwargs["closure"])}
        return None

    def _began(self, args: tuple, kwargs: dict) -> None:
        self._called()
        self._timeline.enter(self._making())

    def _ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._timeline.leave()
