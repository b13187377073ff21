"""Shows the progress of long work: the caller's progress bar, or else a line every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

Report = Callable[[str], None]
"""Prints one line to the user at once."""

_REPORT_INTERVAL_S = 10.0


class ProgressReporter(Protocol):
    """Shows `doing` within the context; with `counted=False` without a count of samples."""

    def __call__(self, doing: str, counted: bool = True) -> AbstractContextManager[SampleProgress]: ...


def report_in_lines(say: Report) -> ProgressReporter:
    """Returns a reporter for output without a progress bar."""
    return partial(_report_lines, say)


@contextmanager
def _report_lines(say: Report, doing: str, counted: bool = True) -> Iterator[SampleProgress]:
    said = time.monotonic()

    def progress(done: int, samples: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _REPORT_INTERVAL_S:
            said = time.monotonic()
            say(f"{doing}: {done:,} of {samples:,} samples")

    yield progress


SILENT = report_in_lines(lambda line: None)


@contextmanager
def silence_loggers(*names: str) -> Iterator[None]:
    """Suppresses stream output of torch's loggers of these names, and of their children, within the context.

    A logger whose level is below WARNING, as set by TORCH_LOGS, still prints its records.
    """

    def heard(record: logging.LogRecord) -> bool:
        mine = any(f"{record.name}.".startswith(f"{name}.") for name in names)
        return not mine or logging.getLogger(record.name).getEffectiveLevel() < logging.WARNING

    handlers = _stream_handlers()
    for handler in handlers:
        handler.addFilter(heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(heard)


def _stream_handlers() -> list[logging.Handler]:
    """Returns the stream handlers of torch's loggers, without those that write files or traces."""
    known = dict(logging.root.manager.loggerDict)
    loggers = [logger for name, logger in known.items() if f"{name}.".startswith("torch.")]
    handlers = [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]


SampleProgress = Callable[[int, int], None]
"""Receives `(samples read, samples in total)`."""
