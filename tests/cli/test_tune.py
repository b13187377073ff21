"""`hotloop tune`, and training that takes what it remembered."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.plan import Plan
from hotloop.tuning import search
from hotloop.verdicts import Verdict
from tests.cli.in_process import SMALL, Hotloop, commands

CPU = ("--device", "cpu")


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    """In a folder with a Task of many small parameters, whose update pays to be written in another way."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    monkeypatch.setattr(search, "compiled_changes", lambda *given: [])  # compiling has tests of its own
    (tmp_path / "task.py").write_text(
        f"""{SMALL}
def many():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)), nn.Linear(4, 3))

def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)

task = make(model=many, optimizer=adam, epochs=3)
"""
    )
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


def plan_of(folder: Path) -> dict[str, Any]:
    plan = tomllib.loads((folder / "plan.toml").read_text())
    return {axis: value for axis, value in plan.items() if value != getattr(Plan(), axis)}


def test_what_it_finds_is_what_training_takes(hotloop: Hotloop, tmp_path: Path) -> None:
    done = hotloop("tune", "task.py", *CPU, "--set", "threads=1", "--time-limit", "3s", "--json")
    assert done.code == 0
    verdict = Verdict(**done.document)
    assert verdict.winner is not None
    winner = verdict.plan(verdict.winner)
    assert winner.verdict == "faster"  # 120 small updates one by one, or in one kernel: many times the noise
    assert winner.parity in ("bitwise", "fp32-equivalent")
    assert winner.plan["optimizer"] in ("fused", "foreach")
    assert winner.plan["threads"] == 1  # as it was set

    said = hotloop("train", "task.py", *CPU, "--run", "remembered")
    assert "remembered as the fastest" in said.err
    assert plan_of(tmp_path / "remembered") == plan_of_timing(winner.plan)

    hotloop("train", "task.py", *CPU, "--plan", "baseline", "--run", "plain")
    assert plan_of(tmp_path / "plain") == {}

    # Another Task in the same file's place is another Task.
    (tmp_path / "task.py").write_text((tmp_path / "task.py").read_text().replace("lr=1e-3", "lr=2e-3"))
    said = hotloop("train", "task.py", *CPU, "--run", "changed")
    assert "remembered" not in said.err


def plan_of_timing(axes: dict[str, Any]) -> dict[str, Any]:
    return {axis: value for axis, value in axes.items() if value != getattr(Plan(), axis)}


def test_a_run_too_short_to_tune_keeps_the_baseline_and_says_so(hotloop: Hotloop) -> None:
    done = hotloop("tune", "task.py", *CPU, "--json")
    assert done.code == 0
    assert done.document["winner"] == "baseline"
    assert any("doesn't pay" in note for note in done.document["notes"])


WRONG = {
    "a time limit": (("--time-limit", "soon"), "time-limit"),
    "an axis": (("--set", "nosuch=1"), "nosuch"),
    "a device": (("--device", "cuda:7"), "cuda:7"),
    "an axis that can't be run": (("--set", "graphs=step", *CPU), "graphs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_line(hotloop: Hotloop, name: str) -> None:
    arguments, says = WRONG[name]
    done = hotloop("tune", "task.py", *arguments)
    assert done.code in (1, 2)
    errors = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in done.err
