"""What is shown while something takes long: a bar of the caller's, else lines now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

from hotloop.data.materialise import Progress

Say = Callable[[str], None]
"""Shows a line to the user at once."""

_SAY_EVERY_S = 10.0


class During(Protocol):
    """Shows `doing` while the context lasts; unless `counted`, nothing is told of how far it is."""

    def __call__(self, doing: str, counted: bool = True) -> AbstractContextManager[Progress]: ...


def in_lines(say: Say) -> During:
    """For where there is no bar."""
    return partial(_lines, say)


@contextmanager
def _lines(say: Say, doing: str, counted: bool = True) -> Iterator[Progress]:
    said = time.monotonic()

    def progress(done: int, samples: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            say(f"{doing}: {done:,} of {samples:,} samples")

    yield progress


SILENT = in_lines(lambda line: None)
