"""What is said of Python loops whose work lies on several lines."""

from __future__ import annotations

from hotloop.core.records.profile import Remedy
from tests.support.profiler.handmade_steps import line, loop, remedies, seen


def spread(lines: int, function: str = "Net.forward", calls: int = 50, first: int = 1) -> list[Remedy]:
    """Of a loop that takes 4 % of the step on each line, and Python there that takes more."""
    ones = [one for n in range(lines) for one in loop(calls, 0.0025, f"net.py:{first + n}", function=function)]
    sampled = [line("forward", 1.0, f"net.py:{first + n}", function=function) for n in range(lines)]
    return remedies(seen({"forward": 9.0}, operators=ones, lines=sampled))


def loops(found: list[Remedy]) -> list[Remedy]:
    return [one for one in found if one.cause.startswith("many tiny kernels")]


def test_lines_of_one_loop_are_one_remedy() -> None:
    found = spread(8)
    (whole,) = loops(found)
    assert whole.gain > 0.25 and "a Python loop of 50 rounds" in whole.cause
    assert whole.evidence.startswith("8 lines of Net.forward run 50 times in a step and start 1200 operations")
    assert [one.where for one in found if one.where.startswith("net.py:")] == [whole.where], "others are named with it"


def test_the_heaviest_line_stands_for_a_loop() -> None:
    ones = [
        one
        for number, each_ms in ((1, 0.002), (2, 0.01), (3, 0.002))
        for one in loop(
            50, each_ms, f"net.py:{number}", function="Net.forward.<locals>.<listcomp>"[: 11 + 20 * (number > 1)]
        )
    ]
    assert [one.where for one in loops(remedies(seen({"forward": 9.0}, operators=ones)))] == ["net.py:2"]


def test_lines_of_other_functions_and_other_rounds_are_other_loops() -> None:
    ones = [
        one
        for number, (function, calls) in enumerate([("a", 50), ("b", 50), ("b", 100), ("", 50), ("", 50)])
        for one in loop(calls, 0.5 / calls, f"net.py:{number}", function=function)
    ]
    found = loops(remedies(seen({"forward": 9.0}, operators=ones)))
    assert sorted(one.where for one in found) == [f"net.py:{number}" for number in range(5)]
