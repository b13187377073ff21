"""What is shown while something takes long: a bar of the caller's, else lines now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

Report = Callable[[str], None]
"""Shows a line to the user at once."""

_REPORT_INTERVAL_S = 10.0


class ProgressReporter(Protocol):
    """Shows `doing` while the context lasts; unless `counted`, nothing is told of how far it is."""

    def __call__(self, doing: str, counted: bool = True) -> AbstractContextManager[SampleProgress]: ...


def report_in_lines(say: Report) -> ProgressReporter:
    """For where there is no bar."""
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
    """Without the lines that torch's loggers of these names, and those below them, write to a stream.

    A logger that was asked for more than warnings, as by TORCH_LOGS, says all the same what it has to.
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
    """Of torch's loggers, several of which have a handler of their own; not those that write files or traces."""
    known = dict(logging.root.manager.loggerDict)
    loggers = [logger for name, logger in known.items() if f"{name}.".startswith("torch.")]
    handlers = [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]


SampleProgress = Callable[[int, int], None]
"""Is told `(samples read, of how many)`; that none is read yet, while some are looked at."""
