"""Windows find the steps, switch the exchanges, and compare steps of the same kind, by wall time and CPU time, at small cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hotloop.exchanges import races
from hotloop.exchanges.races import PairedTimes, Seconds, TimedStep, WindowPairs, compare_windows
from hotloop.exchanges.windows import StepWindows
from hotloop.tuning.races.statistics import verdict_of
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


class Script:
    """A script whose clock a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        set_clocks(monkeypatch, lambda: self.now_s)
        self.lines = list[str]()
        self.windows = StepWindows(lambda: True, self.lines.append, dry_run=False)

    def factor(self) -> float:
        return 1.25 if self.windows.enabled else 1.0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_steps_with_and_without_a_second_update_are_compared_with_their_like(script: Script) -> None:
    """An actor that is updated at every third step of its critic, which takes six times as long; the exchange slows all steps."""
    actor, critic = Optimizer(), Optimizer()
    for number in range(3000):
        script.now_s += 0.001 * script.factor()
        if number % 3 == 2:
            script.now_s += 0.005 * script.factor()
            script.windows.update_ended(actor)
        script.windows.update_ended(critic)
    assert script.lines and all("steps are 0.80 times as fast with it (0.80 to 0.80)" in line for line in script.lines)


def test_steps_with_more_recorded_operations_are_compared_with_their_like(script: Script) -> None:
    """A step whose network is called twice takes twice as long; the numbers of both kinds change with time."""
    optimizer, weight = Optimizer(), nn.Parameter(torch.ones(()))
    for number in range(2000):
        calls = 1 + (number * number // 50) % 2
        for _ in range(calls):
            (weight * 2).sin()
        script.now_s += 0.004 * calls * script.factor()
        script.windows.update_ended(optimizer)
    assert script.lines and "0.80 times as fast" in script.lines[0]


def step(step_s: float, *kind: object, cpu_s: float | None = None) -> TimedStep:
    return TimedStep(Seconds(step_s, step_s if cpu_s is None else cpu_s), kind)


def test_windows_without_steps_of_the_same_kind_are_not_compared() -> None:
    one, other = [step(1.0, "a", 5)] * 6, [step(0.5, "b", 5)] * 6
    assert compare_windows(one, other) is None
    assert compare_windows(one, [step(0.5, "a", 2)] * 6) == (Seconds(1.0, 1.0), Seconds(0.5, 0.5)), "compiled"
    mixed = [step(1.0, "a", 5)] * 5 + [step(9.0, "c", 1)]
    assert compare_windows(one, mixed) == (Seconds(1.0, 1.0), Seconds(1.0, 1.0))


def race(monkeypatch: pytest.MonkeyPatch, step_of: Callable[[bool, int], TimedStep], steps: int = 5000) -> WindowPairs:
    """Runs a race of windows to its end."""
    now_s, on = [0.0], [False]
    set_clocks(monkeypatch, lambda: now_s[0])
    pairs = WindowPairs(lambda enabled: on.__setitem__(0, enabled))
    for number in range(steps):
        now = step_of(on[0], number)
        now_s[0] += now.seconds.wall_s
        if not pairs.is_open:
            pairs.begin()
        elif pairs.step_ended(now) is not None and pairs.is_over:
            return pairs
    raise AssertionError("the race has no end")


def test_a_race_of_unlike_windows_ends_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = race(monkeypatch, lambda on, number: step(0.01, number))
    assert pairs.times.ratio() is None and pairs.is_unlike


def test_two_kinds_that_look_alike_show_no_gain() -> None:
    """A step of 10 ms and one of 30 ms alternate; the median of a window would be one of both, by chance."""
    even, odd = [step((0.01, 0.03)[number % 2]) for number in range(11)], [step(0.03), step(0.01)] * 5 + [step(0.03)]
    compared = compare_windows(even, odd)
    assert compared is not None and compared[1].wall_s < 1.25 * compared[0].wall_s


def test_a_step_with_an_evaluation_is_left_out() -> None:
    compared = compare_windows([step(0.01)] * 9 + [step(5.0)], [step(0.01)] * 10)
    assert compared is not None and compared[0].wall_s == pytest.approx(0.01)


def test_a_gain_must_show_in_wall_time_and_in_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs have slowed the windows without the exchange, whose CPU time is the same."""
    pairs = race(monkeypatch, lambda on, number: step(0.01 if on else 0.015, cpu_s=0.01))
    ratio = pairs.times.ratio()
    assert ratio is not None and ratio.median == pytest.approx(1.0) and verdict_of(ratio) != "faster"
    waiting = race(monkeypatch, lambda on, number: step(0.01 if on else 0.02, cpu_s=0.001)).times.ratio()
    assert waiting is not None and waiting.median == pytest.approx(2.0), "a script that waits has little CPU time"


def test_a_race_that_costs_too_much_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = race(monkeypatch, lambda on, number: step(0.115 if on else 0.1))
    assert pairs.times.is_costly and pairs.times.count <= 2 and pairs.times.lost_s > 0.05
    fair = race(monkeypatch, lambda on, number: step(0.01))
    assert not fair.times.is_costly and fair.times.lost_s == pytest.approx(0.0)


def test_a_thread_that_waits_for_a_core_makes_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, delays_s = [0.0], {"1": 0.0, "2": 0.0}
    set_clocks(monkeypatch, lambda: now_s[0])
    monkeypatch.setattr(races, "_delays_s", lambda: dict(delays_s))
    times = PairedTimes()
    assert not times.was_busy()
    times.add(True, Seconds(1.0))
    now_s[0], delays_s["2"] = 10.0, 0.9
    assert not times.was_busy()
    delays_s["2"] = 1.1
    assert times.was_busy()


def test_cpu_time_counts_where_other_programs_take_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times, delays_s = PairedTimes(), {"1": 0.0}
    set_clocks(monkeypatch, lambda: 60.0)
    monkeypatch.setattr(races, "_delays_s", lambda: dict(delays_s))
    for _ in range(12):
        times.add(False, Seconds(5.0, 1.0))
        times.add(True, Seconds(2.5, 1.0))
    assert times.ratio() is not None and times.ratio().median == pytest.approx(2.0)
    delays_s["1"] = 40.0
    assert times.ratio().median == pytest.approx(1.0)
