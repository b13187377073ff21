"""Reports to the user: lines, and the progress of long work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

Say = Callable[[str], None]
"""Prints one line to the user at once."""

Progress = Callable[[str, float], None]
"""Takes an activity, and its completed share from 0 to 1."""

SampleProgress = Callable[[int, int], None]
"""Takes `(samples read, of how many)`."""

_REPORT_INTERVAL_S = 10.0


class ProgressReporter(Protocol):
    """Shows `doing` while the context lasts, with a count of samples if `counted`."""

    def __call__(self, doing: str, counted: bool = True) -> AbstractContextManager[SampleProgress]: ...


@dataclass(frozen=True)
class Reporter:
    """Reports lines and the progress of long work to the user; silent by default.

    Attributes:
        say: shows a line at once.
        bar: shows a progress bar. Without a bar, counted work shows a line every 10 s.
    """

    say: Say = lambda line: None
    bar: ProgressReporter | None = None

    def during(self, doing: str, counted: bool = True) -> AbstractContextManager[SampleProgress]:
        """Shows `doing` while the context lasts, with a count of samples if `counted`."""
        return _report_lines(self.say, doing) if self.bar is None else self.bar(doing, counted=counted)


@contextmanager
def _report_lines(say: Say, doing: str) -> Iterator[SampleProgress]:
    said = time.monotonic()

    def progress(done: int, samples: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _REPORT_INTERVAL_S:
            said = time.monotonic()
            say(f"{doing}: {done:,} of {samples:,} samples")

    yield progress


SILENT = Reporter()


@contextmanager
def silence_loggers(*names: str) -> Iterator[None]:
    """Suppresses stream output of torch's loggers of these names, and of their children, within the context.

    A logger whose level is below WARNING, as set by TORCH_LOGS, still prints its records.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        mine = any(f"{record.name}.".startswith(f"{name}.") for name in names)
        return not mine or logging.getLogger(record.name).getEffectiveLevel() < logging.WARNING

    loggers = [
        logger for name, logger in dict(logging.root.manager.loggerDict).items() if f"{name}.".startswith("torch.")
    ]
    every = [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]
    handlers = [handler for handler in every if type(handler) is logging.StreamHandler]  # not those of files or traces
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)
