"""How many looks at the stack must have found a line before anything is said of it. Records are made by hand."""

from __future__ import annotations

import pytest

from hotloop.core.records.profile import Remedy
from hotloop.core.records.profile_terms import Phase
from tests.support.profiler.handmade_steps import line, operator, remedies, seen


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


def test_what_is_told_by_operators_alone_is_told_of_them() -> None:
    """Of the 1.5 ms that a single look gave to the line, 0.6 are known to be an operator's."""
    ones = [operator("cos", 0.6, phase="python", where="train.py:33")]
    (found,) = remedies(seen({"python": 1.5}, lines=[line("python", 1.5, "train.py:33", looks=1)], operators=ones))
    assert found.cause.startswith("tensors made or converted") and found.gain == pytest.approx(0.06)


def test_lines_whose_operators_count_by_themselves_stand_alone_however_few_looks_found_them() -> None:
    ones = [operator("cat", 0.8, phase="python", where="train.py:33")]
    ones += [operator("cos", 0.7, phase="python", where="train.py:34")]
    trains = [line("update", 1.0, "train.py:30", library="torch")]
    lines = [line("python", one.ms, one.where, looks=2) for one in ones]
    found = remedies(seen({"python": 1.5}, lines=[*trains, *lines], operators=ones))
    assert {one.where: one.gain for one in found} == {
        "train.py:33": pytest.approx(0.08),
        "train.py:34": pytest.approx(0.07),
    }


@pytest.mark.parametrize("phase", ["python", "forward"])
@pytest.mark.parametrize(("looks", "named"), [(1, False), (2, True)])
def test_chance_is_not_several_small_things_either(phase: Phase, looks: int, named: bool) -> None:
    """A helper and the line that calls it were seen once each."""
    inner = line(phase, 0.6, "log.py:5", function="note", within="log.py:9", looks=looks)
    outer = line(phase, 0.02, "log.py:9", function="report", looks=1)
    assert bool(remedies(seen({phase: 0.62}, lines=[inner, outer]))) is named


def test_lines_that_few_looks_found_are_one_part_with_those_around_them() -> None:
    lines = [line("python", 0.6, f"train.py:{n}", looks=1) for n in (33, 34, 35)]
    (found,) = remedies(seen({"python": 1.8}, lines=lines))
    assert found.gain == pytest.approx(0.18)
