"""Figures of single steps are corrected where steps have different lengths, and stay as they are where all have one."""

from __future__ import annotations

import pytest

from hotloop.profiler.base.steps import Kind, StepFact
from hotloop.profiler.summary import StepLengths


def steps(kind: Kind, *calls: int) -> list[StepFact]:
    """Steps of which each call takes a millisecond."""
    return [StepFact(kind, ms=float(many), calls=many) for many in calls]


def lengths(timed: list[StepFact], *others: StepFact) -> StepLengths:
    return StepLengths([*timed, *others], timed)


VARYING = steps("instrumented", 60, 100, 80, 80)
OPERATOR = {"name": "aten::addmm", "phase": "forward", "calls": 20.0, "ms": 4.0, "flops": 100.0, "bytes": None}


def test_an_operator_of_short_steps_is_given_per_usual_step() -> None:
    found = lengths(VARYING, *steps("traced", 20, 20)).operator(OPERATOR)
    assert found["calls"] == pytest.approx(80.0) and found["ms"] == pytest.approx(16.0)
    assert found["flops"] == pytest.approx(400.0) and found["bytes"] is None


def test_a_habit_of_short_steps_is_given_per_usual_step() -> None:
    habit = {"what": "argument validation", "where": "a.py:1", "per_step": 10.0, "ms": 2.0}
    found = lengths(VARYING, *steps("habits", 10, 10, 400)).habit(habit)
    assert found["per_step"] == pytest.approx(80.0) and found["ms"] == pytest.approx(16.0)


@pytest.mark.parametrize("changes", [{"phase": "update"}, {"calls": 1.0}], ids=["update", "once in a step"])
def test_what_goes_with_the_step_stays(changes: dict) -> None:
    operator = OPERATOR | changes
    assert lengths(VARYING, *steps("traced", 20)).operator(operator) == operator


def test_a_held_up_traced_step_does_not_count() -> None:
    found = lengths(VARYING, *steps("traced", 20, 20, 200)).operator(OPERATOR)
    assert found["calls"] == pytest.approx(80.0)


def test_steps_of_one_length_are_left_alone() -> None:
    same = steps("instrumented", 20, 20, 20)
    assert lengths(same, *steps("traced", 20)).operator(OPERATOR) == OPERATOR
    assert lengths([], *steps("traced", 20)).operator(OPERATOR) == OPERATOR


def test_the_runs_of_a_line_go_with_the_calls_even_if_an_operator_does_not() -> None:
    found = lengths(VARYING, *steps("traced", 20)).operator(OPERATOR | {"calls": 2.0, "line_runs": 20.0})
    assert found["calls"] == 2.0 and found["line_runs"] == pytest.approx(80.0)
