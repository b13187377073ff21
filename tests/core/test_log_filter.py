"""What torch logs of what the user is told in a line stays out of the terminal, and nothing else does."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  gives its loggers their handlers

from hotloop.core.reporter import silence_loggers

COMPILER = "torch._inductor"
LOGGER = logging.getLogger(f"{COMPILER}.ir")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What a handler of the compiler's loggers writes, as theirs does to stderr."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger(COMPILER).addHandler(handler)
    yield written
    logging.getLogger(COMPILER).removeHandler(handler)


def test_it_is_kept_back_for_so_long(stream: io.StringIO) -> None:
    with silence_loggers("torch"):
        LOGGER.error("within")
    LOGGER.error("after")
    assert stream.getvalue() == "after\n"


def test_an_error_on_the_way_lets_it_through_again(stream: io.StringIO) -> None:
    with pytest.raises(ValueError), silence_loggers("torch"):
        raise ValueError
    LOGGER.error("after")
    assert stream.getvalue() == "after\n"


def test_other_loggers_are_heard(stream: io.StringIO) -> None:
    with silence_loggers(f"{COMPILER}.i", "torch.distributed"):  # a part of a name is no name
        LOGGER.error("within")
    assert stream.getvalue() == "within\n"


def test_who_asks_torch_for_its_log_gets_it(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TORCH_LOGS=+inductor does."""
    monkeypatch.setattr(logging.getLogger(COMPILER), "level", logging.DEBUG)
    logging.getLogger(COMPILER).manager._clear_cache()  # type: ignore[attr-defined]
    with silence_loggers("torch"):
        LOGGER.error("within")
    assert stream.getvalue() == "within\n"


def test_torchs_traces_are_left_alone() -> None:
    """Their handler must see a first record, with which it goes if nobody asked for traces: until then, each is made up."""
    trace = logging.getLogger("torch.__trace")
    before = [list(handler.filters) for handler in trace.handlers]
    with silence_loggers("torch"):
        assert [list(handler.filters) for handler in trace.handlers] == before
