"""Keeps to itself what torch logs of what the user is told in a line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(*names: str) -> Iterator[None]:
    """Without what torch's loggers of these names, and those below them, write; all the same where TORCH_LOGS asks for it."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return

    def others(record: logging.LogRecord) -> bool:
        return not any(f"{record.name}.".startswith(f"{name}.") for name in names)

    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(others)


def _handlers() -> list[logging.Handler]:
    """Of torch's loggers, of which several have one of their own."""
    known = dict(logging.root.manager.loggerDict)
    loggers = [logger for name, logger in known.items() if f"{name}.".startswith("torch.")]
    return [handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers]
