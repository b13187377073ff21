"""What several traced steps come to together."""

from __future__ import annotations

import pytest

from hotloop.profiler.trace.events import OperatorKey, TracedSteps, merge_typical_steps

KEY = OperatorKey("aten::mm", "forward", None, ("train.py", 7), ("8x8",), "float32", "cpu", "", None)


def traced(*operators_ms: float, calls: int = 1, key: OperatorKey = KEY) -> list[TracedSteps]:
    """Steps of 10 ms beside an operator, which takes so long in each."""
    steps = []
    for ms in operators_ms:
        step = TracedSteps(10.0 + ms, steps=1)
        step.sums[key].add(ms * 1e6, None, None, calls)
        step.walls[key.module, key.phase] = step.phases[key.phase] = round((4 + ms) * 1e6)
        steps.append(step)
    return steps


@pytest.mark.parametrize("held_up", range(3))
def test_what_an_operator_takes_longer_for_losing_its_core_once_is_none_of_its_time(held_up: int) -> None:
    times = [1.0, 1.2, 1.1]
    times[held_up] = 5.0
    found, usual = merge_typical_steps(traced(*times)), sorted(times)[1]
    assert found.sums[KEY].ns == pytest.approx((sum(times) - 5 + usual) * 1e6)
    assert found.walls[None, "forward"] == found.phases["forward"] == pytest.approx(12e6 + found.sums[KEY].ns)
    assert found.ms == pytest.approx(30 + found.sums[KEY].ns / 1e6)


def test_what_differs_somewhat_counts_as_it_is() -> None:
    assert merge_typical_steps(traced(1.0, 2.0, 2.9)).sums[KEY].ns == pytest.approx(5.9e6)


def test_of_two_steps_nobody_knows_which_was_held_up() -> None:
    assert merge_typical_steps(traced(1.0, 5.0)).sums[KEY].ns == pytest.approx(6e6)


def test_an_operator_that_is_called_more_often_in_a_step_wasnt_held_up() -> None:
    many = traced(1.0, 1.1) + traced(8.0, calls=8)
    assert merge_typical_steps(many).sums[KEY].ns == pytest.approx(10.1e6)


def test_kernels_of_an_accelerator_have_no_core_to_lose() -> None:
    key = KEY._replace(device="cuda:0")
    assert merge_typical_steps(traced(1.0, 1.1, 5.0, key=key)).sums[key].ns == pytest.approx(7.1e6)


def test_a_step_that_took_several_times_as_long_counts_for_nothing() -> None:
    assert merge_typical_steps(traced(1.0, 1.0, 1.0, 90.0)).steps == 3
