"""What torch logs of what the user is told in a line stays out of the terminal, and nothing else does."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  # gives its loggers their handlers

from hotloop.quiet import unlogged

INDUCTOR = "torch._inductor.ir"


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.name)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What comes to the handler of the compiler's loggers, as its lines on stderr do."""
    handler, logger = Kept(), logging.getLogger("torch._inductor")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_it_is_kept_back_for_so_long(kept: Kept) -> None:
    with unlogged("torch"):
        logging.getLogger(INDUCTOR).error("failed")
    assert not kept.names
    logging.getLogger(INDUCTOR).error("failed")
    assert kept.names == [INDUCTOR]


def test_an_error_on_the_way_lets_it_through_again(kept: Kept) -> None:
    with pytest.raises(ValueError), unlogged("torch"):
        raise ValueError
    logging.getLogger(INDUCTOR).error("failed")
    assert kept.names == [INDUCTOR]


def test_other_loggers_are_heard(kept: Kept) -> None:
    with unlogged("torch._inductor.i", "torch.distributed"):  # a part of a name is no name
        logging.getLogger(INDUCTOR).error("failed")
    assert kept.names == [INDUCTOR]


def test_who_asks_torch_for_its_log_gets_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+inductor")
    with unlogged("torch"):
        logging.getLogger(INDUCTOR).error("failed")
    assert kept.names == [INDUCTOR]
