"""Keeps out of the terminal what torch logs while it does something that the user is told of in a line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(*names: str) -> Iterator[None]:
    """Without the lines that torch's loggers of these names, and those below them, write to a stream.

    A logger that was asked for more than warnings, as by TORCH_LOGS, says all the same what it has to.
    """

    def heard(record: logging.LogRecord) -> bool:
        mine = any(f"{record.name}.".startswith(f"{name}.") for name in names)
        return not mine or logging.getLogger(record.name).getEffectiveLevel() < logging.WARNING

    handlers = _to_streams()
    for handler in handlers:
        handler.addFilter(heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(heard)


def _to_streams() -> list[logging.Handler]:
    """Of torch's loggers, several of which have a handler of their own; not those that write files or traces."""
    known = dict(logging.root.manager.loggerDict)
    loggers = [logger for name, logger in known.items() if f"{name}.".startswith("torch.")]
    handlers = [each for logger in loggers if isinstance(logger, logging.Logger) for each in logger.handlers]
    return [handler for handler in handlers if type(handler) is logging.StreamHandler]
