"""The record of whole live runs: the best fixed plan in hindsight, ratios by round, goals, and options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import live
from bench.speed.journal import Journal
from bench.speed.lanes import TUTORIAL

SECONDS = {TUTORIAL: 120.0, "train-auto": 60.0, "unasked": 100.0, "baseline": 110.0, "compile=package": 55.0}


def journal(path: Path, rounds: int = 6, minutes: float = 2.0, **changed: float) -> Journal:
    found = Journal(path, resume=True, setup={}, measured={"command": "for the test"})
    for number in range(rounds):
        for lane, seconds in (SECONDS | changed).items():
            total = seconds * (1 + 0.01 * number)
            found.add(
                {"workload": "W4", "minutes": minutes, "round": number, "lane": lane},
                epochs=3,
                total_s=total,
                failure=None,
            )
    return found


def goals(found: Journal) -> dict[str, bool]:
    (one,) = live.figures(found)
    return one["goals"]


def test_a_run_is_compared_with_the_best_fixed_plan_of_the_same_rounds(tmp_path: Path) -> None:
    (one,) = live.figures(journal(tmp_path / "j"))
    assert one["best"] == "compile=package"
    ratios = {name: ratio["median"] for name, ratio in one["times_as_fast"].items()}
    assert ratios == pytest.approx({"best_fixed": 55 / 60, "default": 100 / 60, "baseline": 110 / 60, "tutorial": 2.0})
    assert one["times_as_fast"]["tutorial"]["low"] is not None


def test_goals_depend_on_the_length_of_the_run(tmp_path: Path) -> None:
    short, long = goals(journal(tmp_path / "a")), goals(journal(tmp_path / "b", minutes=10.0))
    assert short["within 15% of the best fixed plan"] and not long["within 5% of the best fixed plan"]
    assert short["1.9 times the tutorial's loop"] and short["not surely below 0.97 of the baseline"]
    slow = goals(journal(tmp_path / "c", **{"train-auto": 150.0}))
    assert not any(slow.values())


def test_a_failed_run_has_no_figures_and_is_in_the_table(tmp_path: Path) -> None:
    found = journal(tmp_path / "j", rounds=1)
    row: dict[str, Any] = {"workload": "W4", "minutes": 2.0, "round": 1, "lane": "train-auto"}
    found.add(row, epochs=3, total_s=None, failure="it was killed")
    text = live.table(live.figures(found), list(live.failures(found)))
    assert "**failed**: W4, train-auto, round 1: it was killed" in text and "| W4 | 2 min |" in text


@pytest.mark.parametrize("arguments", [["W9"], ["--minutes", "two"], ["--minutes", "0"], ["--rounds", "0"]], ids=str)
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        live.parsed(arguments)
    assert "expected" in capsys.readouterr().err
