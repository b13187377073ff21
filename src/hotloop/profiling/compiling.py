"""Nothing that watches is in the way while torch compiles: what is compiled with it would be compiled again without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from hotloop.profiling.unseen import bare


class Compiling:
    """Takes what watches away when torch begins to compile, and puts it back afterwards.

    Args:
        away: takes away what compiled code may hold.
        back: puts it back.
    """

    def __init__(self, away: Callable[[], None], back: Callable[[], None]) -> None:
        self._away, self._back = away, back
        self._call: Any = None

    def listen(self) -> None:
        """Begins, or goes on: importing the compiler takes seconds, and `torch._dynamo.reset()` forgets who listens."""
        handler = _handler()
        if handler is not None and self._begins not in handler.start_callbacks:
            handler.register_start_callback(self._begins)
            handler.register_end_callback(self._ended)

    def remove(self) -> None:
        handler = _handler()
        if handler is not None:
            with suppress(ValueError):
                handler.remove_start_callback(self._begins)
                handler.remove_end_callback(self._ended)

    def _begins(self, trigger: Any) -> None:
        call = vars(nn.Module)["__call__"]
        if bare(call) is not call:
            self._call, nn.Module.__call__ = call, bare(call)  # type: ignore[method-assign]
        self._away()

    def _ended(self, trigger: Any) -> None:
        self._back()
        if self._call is not None:
            call, self._call = self._call, None
            if nn.Module.__call__ is bare(call):  # nobody has replaced it since
                nn.Module.__call__ = call  # type: ignore[method-assign]


def _handler() -> Any:
    return getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
