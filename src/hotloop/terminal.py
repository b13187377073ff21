"""Where people read: a console on which text of the user's, such as names of classes, can't command the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment

from hotloop.texts import printable


class Terminal(Console):
    """rich's console, on stderr; control characters in what is printed are shown as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stderr": True} | options)

    def _check_buffer(self) -> None:
        """Writes; where nobody can read any more (a pipe that is closed, a disk that is full), the work goes on unseen."""
        try:
            super()._check_buffer()
        except OSError:
            self._go_on_unseen()

    def on_broken_pipe(self) -> None:
        self._go_on_unseen()

    def _go_on_unseen(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # a file that is none of the system's
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # for what Python still holds

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text == "\n" else Segment(printable(text), style)


class Bar(Progress):
    """rich's progress bar; where the system allows no thread that would move it, the work goes on without."""

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError:  # "can't start new thread"
            self.live._refresh_thread = None
            self.stop()
            self.disable = True
