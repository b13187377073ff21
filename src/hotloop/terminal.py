"""Where people read: a console on which text of the user's, such as names of classes, can't command the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hotloop.texts import printable


class Terminal(Console):
    """rich's console, on stderr; control characters in what is printed are shown as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"stderr": True} | options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text == "\n" else Segment(printable(text), style)
