"""Exchanges installed in the test's process, with the parts that they make."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from hotloop.exchanges import module_call, races
from hotloop.exchanges import modules as modules_module
from hotloop.exchanges import part as part_module
from hotloop.exchanges import workers as workers_module
from hotloop.exchanges.loader_exchange import LoaderExchange
from hotloop.exchanges.modules import ModuleExchange
from hotloop.exchanges.optimizer_exchange import OptimizerExchange
from hotloop.exchanges.part import Part
from hotloop.exchanges.workers import WorkerExchange


@pytest.fixture
def end_by_signal() -> Iterator[Callable[..., None]]:
    """A function in which a signal arrives, whose handler raises TimeoutError, as a script's own handler may do."""

    def raise_error(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGTERM, raise_error)
    yield lambda *args, **kwargs: signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def set_clocks(monkeypatch: pytest.MonkeyPatch, now_s: Callable[[], float]) -> None:
    """Lets wall time and CPU time be those of a test, on a machine without other programs."""
    monkeypatch.setattr(time, "perf_counter", now_s)
    monkeypatch.setattr(time, "process_time", now_s)
    monkeypatch.setattr(races, "_delays_s", dict)


class Exchanged:
    """The session of an installed exchange, with its parts."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.exact, self.is_enabled = False, True

    def make_part(self, kind: str, name: str, exchanges: Any) -> Part:
        part = Part(kind, name, exchanges, exact=self.exact, changed=lambda: None)
        self.parts.append(part)
        return part

    def is_mine(self) -> bool:
        return True

    def is_exchanging(self) -> bool:
        return True

    def is_choosing_threads(self) -> bool:
        return False

    @property
    def part(self) -> Part:
        (part,) = self.parts
        return part


def _installed(kind: Callable[..., Any]) -> Iterator[Exchanged]:
    exchanged = Exchanged()
    exchange = kind(exchanged)
    exchange.install()
    try:
        yield exchanged
    finally:
        exchange.remove()


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchanged]:
    """Comparisons may take any share of so short a training."""
    monkeypatch.setattr(part_module, "is_costly", lambda cost_s, run_s: False)
    yield from _installed(OptimizerExchange)


@pytest.fixture
def loaders() -> Iterator[Exchanged]:
    yield from _installed(LoaderExchange)


class ExchangedWorkers(Exchanged):
    """The parts of an installed worker exchange; `fetched` counts batches that the script got from workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.fetched, self._monkeypatch = 0, monkeypatch
        self._others = psutil.Process().children()

    def processes(self) -> list[psutil.Process]:
        """The processes that the test has started and that run, without those of fixtures that other tests share."""
        started = [one for one in psutil.Process().children() if one not in self._others]
        return [one for one in started if one.status() != psutil.STATUS_ZOMBIE]

    def use(self) -> None:
        """Uses all exchanges that are proven, without a race."""
        for part in self.parts:
            part.stage = "use" if part.stage == "race" else part.stage

    def leave(self) -> None:
        """Leaves all batches, also those of new data sets, to the test's own process."""
        self._monkeypatch.setattr(workers_module, "_TIMED_BATCHES", 10**9)
        for part in self.parts:
            part.stage = "off"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExchangedWorkers]:
    """Tries workers for each data set, after two batches."""
    for name, value in {"_TIMED_BATCHES": 2, "_MIN_FETCH_S": 0.0, "_MIN_SHARE": 0.0, "_MIN_PASS_S": 0.0}.items():
        monkeypatch.setattr(workers_module, name, value)
    exchanged, copy = ExchangedWorkers(monkeypatch), workers_module._copy

    def counted(batch: Any) -> Any:
        exchanged.fetched += 1
        return copy(batch)

    monkeypatch.setattr(workers_module, "_copy", counted)
    exchange = WorkerExchange(exchanged)
    exchange.install()
    try:
        yield exchanged
    finally:
        exchange.remove()


class ExchangedModules(Exchanged):
    """The parts of an installed module exchange; a test reports the end of each step to the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange = ModuleExchange(self)
        self.steps = 0

    def step_ended(self) -> None:
        """Ends a step, and waits for a fork that compiles or proves."""
        self.steps += 1
        self.exchange.step_ended(self.steps)
        for site in self.exchange._sites.values():
            while site.process is not None and site.process.poll() is None:
                time.sleep(0.01)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExchangedModules]:
    """Compiles at once, and reads none of the tests' files."""
    monkeypatch.setattr(modules_module, "_MIN_TRAINED_S", 0.0)
    monkeypatch.setattr(modules_module, "_MIN_GAIN", 0.0)
    monkeypatch.setattr(modules_module, "_IN_PLACE_S", -float("inf"))
    monkeypatch.setattr(module_call, "_script_files", lambda: iter(()))
    exchanged = ExchangedModules()
    exchanged.exchange.install()
    try:
        yield exchanged
    finally:
        exchanged.exchange.remove()
