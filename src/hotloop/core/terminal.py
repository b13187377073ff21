"""A console on stderr that shows control characters in the user's texts, such as class names, as escapes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment

from hotloop.errors import escape_control_characters


class Terminal(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stderr": True} | options)

    def _check_buffer(self) -> None:
        """Writes the buffer; after a failure, such as a closed pipe or a full disk, the console stays silent."""
        try:
            super()._check_buffer()
        except OSError:
            self._silence()

    def on_broken_pipe(self) -> None:
        self._silence()

    def _silence(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # the file has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # Python's buffered output goes to devnull

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text == "\n" else Segment(escape_control_characters(text), style)


class Bar(Progress):
    """rich's progress bar; a system without a further thread for its updates shows no bar."""

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError:  # "can't start new thread"
            self.live._refresh_thread = None
            self.stop()
            self.disable = True
