"""When to look up and when to save: a matter of measured times, so the clock here is a false one."""

from __future__ import annotations

import random

import pytest

from hotloop.core.format import parse_seconds
from hotloop.errors import PlanError
from hotloop.training import cadence as pacing
from hotloop.training.cadence import CheckpointCadence, SpanPacer


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    false = Clock()
    monkeypatch.setattr(pacing.time, "monotonic", false.monotonic)
    return false


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("seed", range(20))
def test_by_default_checkpoints_cost_at_most_a_hundredth_of_the_time(clock: Clock, seed: int) -> None:
    """Whatever a checkpoint costs, and however that changes, the time before each pays for the one before it."""
    draws = random.Random(seed)
    cadence = CheckpointCadence.parse("auto")
    usual_s = cadence.cost_s = 10 ** draws.uniform(-3, 1.5)
    start_s, costs = clock.now_s, [0.0]
    while len(costs) < 30:
        clock.now_s += draws.uniform(0.01, 0.2)
        if not cadence.is_due(0):
            continue
        before_s = clock.now_s - start_s
        assert sum(costs) <= 0.01 * before_s * (1 + 1e-9)
        costs.append(usual_s * draws.choice([0.5, 1, 1, 2, 5]))
        clock.now_s += costs[-1]
        cadence.record_cost(costs[-1])


def test_cheap_checkpoints_come_every_five_seconds_and_not_faster(clock: Clock) -> None:
    cadence = CheckpointCadence.parse("auto")
    cadence.record_cost(1e-5)
    clock.now_s += 4.9
    assert not cadence.is_due(7)
    clock.now_s += 0.2
    assert cadence.is_due(7)
    cadence.record_cost(1e-5)
    assert not cadence.is_due(8)


def test_one_cheap_checkpoint_does_not_forget_dear_ones(clock: Clock) -> None:
    cadence = CheckpointCadence.parse("auto")
    cadence.record_cost(8.0)
    cadence.record_cost(0.0)
    assert cadence.interval_s == pytest.approx(400)
    cadence.record_cost(16.0)
    assert cadence.interval_s == pytest.approx(1600)


def test_by_steps_they_fall_on_multiples(clock: Clock) -> None:
    cadence = CheckpointCadence.parse("10")
    assert [step for step in range(1, 35) if cadence.is_due(step)] == [10, 20, 30]
    assert [cadence.steps_left(step) for step in (0, 1, 9, 10, 25)] == [10, 9, 1, 10, 5]
    clock.now_s += 1e6
    assert not cadence.is_due(11)


def test_by_time_they_ask_the_clock_alone(clock: Clock) -> None:
    cadence = CheckpointCadence.parse("90s")
    cadence.record_cost(50.0)
    assert cadence.steps_left(7) is None
    clock.now_s += 89
    assert not cadence.is_due(10)
    clock.now_s += 1
    assert cadence.is_due(11)


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("2d", 172800)]
)
def test_times_are_read(text: str, expected: float) -> None:
    assert parse_seconds(text, "stop-after") == CheckpointCadence.parse(text).seconds == expected


def test_a_plain_number_is_seconds_in_a_time_and_steps_in_a_cadence() -> None:
    assert parse_seconds("12", "stop-after") == 12
    assert CheckpointCadence.parse("12").steps == 12


@pytest.mark.parametrize("text", ["", "0", "-5", "5x", "s", "often", "0s", "1h-5m", "inf", "nan", "1e400s"])
def test_what_is_no_time_is_refused_in_one_line(text: str) -> None:
    for read in (lambda: parse_seconds(text, "stop-after"), lambda: CheckpointCadence.parse(text)):
        with pytest.raises(PlanError) as caught:
            read()
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- spans


def test_a_span_settles_at_about_a_tenth_of_a_second() -> None:
    pace = SpanPacer()
    assert pace.steps() == 1
    for _ in range(20):
        pace.record_span(pace.steps(), pace.steps() * 0.001)
    assert pace.steps() == 100


def test_a_slow_first_step_does_not_matter_for_long() -> None:
    pace = SpanPacer()
    pace.record_span(1, 30.0)
    for _ in range(40):
        pace.record_span(pace.steps(), pace.steps() * 0.001)
    assert 90 <= pace.steps() <= 100


@pytest.mark.parametrize("step_s", [0.0, 1e-12, 1e9])
def test_a_span_is_never_empty_nor_endless(step_s: float) -> None:
    pace = SpanPacer()
    pace.record_span(1, step_s)
    pace.record_span(0, 5.0)
    assert 1 <= pace.steps() <= 1_000_000
