"""Exchanges installed in the test's process, with the parts that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hotloop.exchanges.loader_exchange import LoaderExchange
from hotloop.exchanges.optimizer_exchange import OptimizerExchange
from hotloop.exchanges.part import Part


class Exchanged:
    """The parts of an installed exchange; `exact` and `enabled` are its session's."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.exact, self.enabled = False, True

    def make_part(self, kind: str, name: str, exchanges: Any) -> Part:
        part = Part(kind, name, exchanges, exact=self.exact, changed=lambda: None)
        self.parts.append(part)
        return part

    @property
    def part(self) -> Part:
        (part,) = self.parts
        return part


def _installed(kind: Callable[..., Any]) -> Iterator[Exchanged]:
    exchanged = Exchanged()
    exchange = kind(exchanged.make_part, lambda: True, lambda: exchanged.enabled)
    exchange.install()
    try:
        yield exchanged
    finally:
        exchange.remove()


@pytest.fixture
def optimizers() -> Iterator[Exchanged]:
    yield from _installed(OptimizerExchange)


@pytest.fixture
def loaders() -> Iterator[Exchanged]:
    yield from _installed(LoaderExchange)
