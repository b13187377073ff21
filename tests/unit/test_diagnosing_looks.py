"""How many looks at the stack must have found a line before anything is said of it. Records are made by hand."""

from __future__ import annotations

import pytest

from hotloop.profiles import Phase, Remedy
from tests.unit.made_steps import line, operator, remedies, seen


def told(looks: int | None, ms: float = 0.6, phase: Phase = "python") -> list[Remedy]:
    function = "net.py:9" if phase == "forward" else "train.py:33"
    return remedies(seen({phase: ms}, lines=[line(phase, ms, function, looks=looks)]))


@pytest.mark.parametrize("phase", ["python", "forward"])
@pytest.mark.parametrize(("looks", "named"), [(1, False), (2, False), (3, True), (None, True)])
def test_a_line_that_one_or_two_looks_found_may_be_chance(phase: Phase, looks: int | None, named: bool) -> None:
    """In a short step all of a phase is given to the one line that was seen in it."""
    assert [one.gain for one in told(looks, phase=phase)] == [pytest.approx(0.06)] * named


@pytest.mark.parametrize("phase", ["python", "forward"])
def test_so_much_of_the_step_is_no_chance(phase: Phase) -> None:
    assert [one.gain for one in told(1, 2.5, phase)] == [pytest.approx(0.25)]


def test_what_operators_take_is_measured_without_looks() -> None:
    ones = [operator("cos", 0.7, phase="python", where="train.py:33")]
    (found,) = remedies(seen({"python": 1.0}, lines=[line("python", 1.0, "train.py:33", looks=1)], operators=ones))
    assert found.gain == pytest.approx(0.07) and found.evidence.count("0.70 ms") == 1


def test_lines_that_few_looks_found_are_one_part_with_those_around_them() -> None:
    lines = [line("python", 0.6, f"train.py:{n}", looks=1) for n in (33, 34, 35)]
    (found,) = remedies(seen({"python": 1.8}, lines=lines))
    assert found.gain == pytest.approx(0.18)
