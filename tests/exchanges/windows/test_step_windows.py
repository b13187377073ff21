"""The windows find the steps, switch the exchanges, and give the gain of a step."""

from __future__ import annotations

import pytest

from hotloop.exchanges.windows.step_windows import StepWindows
from tests.exchanges.conftest import set_clocks


class Optimizer:
    """An optimizer that has stepped."""


class Clock:
    """A clock that training advances: a step takes 10 ms, and `with_s` with exchanges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, with_s: float) -> None:
        self.now, self.with_s = 0.0, with_s
        set_clocks(monkeypatch, lambda: self.now)

    def train(self, windows: StepWindows, steps: int, optimizers: list[Optimizer]) -> None:
        for _ in range(steps):
            self.now += self.with_s if windows.enabled else 0.010
            for optimizer in optimizers:
                windows.update_ended(optimizer)


def windows_of(lines: list[str], *, can_begin: bool = True, dry_run: bool = False) -> StepWindows:
    return StepWindows(lambda: can_begin, lines.append, dry_run=dry_run)


@pytest.mark.parametrize("count", [1, 2])
def test_the_ratio_of_steps_with_one_or_two_optimizers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    clock, lines = Clock(monkeypatch, 0.005), list[str]()
    windows = windows_of(lines)
    clock.train(windows, 1000, [Optimizer() for _ in range(count)])
    record = windows.ratio_record()
    assert record is not None and record["pairs"] >= 12
    assert record["median"] == pytest.approx(2.0) and record["low"] == pytest.approx(2.0)
    assert windows.enabled and lines == [] and windows.steps >= 995


def test_few_steps_run_without_exchanges_after_the_first_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, windows = Clock(monkeypatch, 0.005), windows_of([])
    optimizers = [Optimizer()]
    clock.train(windows, 500, optimizers)
    without = 0
    for _ in range(10_000):
        without += not windows.enabled
        clock.train(windows, 1, optimizers)
    assert 0 < without / 10_000 < 0.01


def test_slower_steps_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(monkeypatch, 0.012), list[str]()
    clock.train(windows_of(lines), 1000, [Optimizer()])
    assert lines and "0.83 times as fast" in lines[0]


def test_without_an_exchange_there_are_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, windows = Clock(monkeypatch, 0.005), windows_of([], can_begin=False)
    clock.train(windows, 500, [Optimizer()])
    assert windows.ratio_record() is None and windows.enabled


def test_a_dry_run_ends_with_the_exchanges_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, windows = Clock(monkeypatch, 0.005), windows_of([], dry_run=True)
    clock.train(windows, 500, [Optimizer()])
    record = windows.ratio_record()
    assert record is not None and record["median"] == pytest.approx(2.0) and not windows.enabled


def test_another_optimizer_that_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, windows = Clock(monkeypatch, 0.005), windows_of([])
    clock.train(windows, 20, [Optimizer()])
    clock.train(windows, 1000, [Optimizer()])
    record = windows.ratio_record()
    assert windows.enabled and record is not None and record["median"] == pytest.approx(2.0)
