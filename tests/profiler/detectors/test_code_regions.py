"""What is spread over functions that each take little is named by the line that calls them. Records are made by hand."""

from __future__ import annotations

import pytest

from hotloop.core.records.profile import LineTime, Remedy
from tests.support.profiler.handmade_steps import line, remedies, seen


def helpers(each: float, within: str, phase: str = "python", many: int = 4) -> list[LineTime]:
    """A function of several lines, each of which calls another function that takes a little."""
    found = []
    for n in range(many):
        found += [
            line(phase, each, f"log.py:{10 * n}", function=f"log_{n}", within=f"report.py:{n}"),
            line(phase, 0.0, f"report.py:{n}", function="report", within=within),
        ]
    return found


def loop(phase: str = "python", **fields: str) -> list[LineTime]:
    """The loop's line that calls `report()`, the one that trains, and the script's that calls the loop."""
    return [
        line(phase, 0.0, "train.py:22", within="train.py:50"),
        line("backward", 5.0, "train.py:21", library="torch", within="train.py:50"),
        line("update", 1.0, "train.py:30", library="torch", within="train.py:50"),
        line("backward", 0.0, "train.py:50", function="<module>", **fields),
    ]


def spread(found: list[Remedy]) -> list[Remedy]:
    return [one for one in found if "small things" in one.cause or "within the network" in one.cause]


def test_small_helpers_of_one_function_are_named_by_the_line_that_calls_it() -> None:
    lines = [*loop(), *helpers(0.2, "train.py:22")]
    (found,) = remedies(seen({"python": 0.8}, lines=lines))
    assert found.where == "train.py:22" and found.gain == pytest.approx(0.08)
    assert found.cause == "several small things at each step: log_0, log_1, log_2, 1 more"


def test_the_innermost_line_that_counts_is_named() -> None:
    """And not those around it, as the one that calls all callbacks."""
    around = [line("python", 0.1, "train.py:7", function="callbacks", within="train.py:22")]
    (found,) = remedies(seen({"python": 0.9}, lines=[*loop(), *around, *helpers(0.2, "train.py:7")]))
    assert found.where == "train.py:7" and found.gain == pytest.approx(0.09)


def test_what_counts_too_little_together_is_not_named() -> None:
    assert remedies(seen({"python": 0.4}, lines=[*loop(), *helpers(0.1, "train.py:22")])) == []


def test_the_line_that_runs_the_training_says_nothing() -> None:
    lines = [
        *loop(),
        *(line("python", 0.2, f"log.py:{n}", function=f"log_{n}", within="train.py:50") for n in range(4)),
    ]
    assert remedies(seen({"python": 0.8}, lines=lines)) == []


def test_functions_that_call_themselves_are_no_endless_way_outwards() -> None:
    lines = [line("python", 0.2, f"log.py:{n}", function=f"log_{n}", within=f"log.py:{(n + 1) % 4}") for n in range(4)]
    assert len(remedies(seen({"python": 0.8}, lines=lines))) <= 1


@pytest.mark.parametrize("library", ["", "torch"])
def test_helpers_within_the_forward_are_named_unless_torch_lies_between(library: str) -> None:
    """A network's line in the loop runs the whole of it."""
    call = line("forward", 0.0, "train.py:22", library=library, within="train.py:50")
    lines = [*loop("forward"), call, line("forward", 3.0, "net.py:2", library="torch", within="train.py:22")]
    found = spread(remedies(seen({"forward": 4.0}, lines=[*lines, *helpers(0.2, "train.py:22", "forward")])))
    assert [one.where for one in found] == ([] if library else ["train.py:22"])
