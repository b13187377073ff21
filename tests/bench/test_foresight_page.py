"""The README of the record of predictions."""

from __future__ import annotations

import pytest

from bench.foresight.claim_page import page

MACHINE = {"processor": {"model": "a CPU", "allowed_cores": 2}}
VERSIONS = {"python": "3.11", "torch": "2.13", "hotloop": "0.1"}


def record(error: float) -> dict:
    row = {
        "set": "mpt", "name": "MPT", "fitted_on": "other sizes", "runs": 3, "statistic": "mean", "error": error, "must": 0.09,
        "coverage": 0.9, "base": "none", "within_20": 1.0, "taken": "2026-01-01T10:00:00+00:00", "commit": None,
    }  # fmt: skip
    everything = {name: value for name, value in row.items() if name != "set"}
    return {"command": "c", "threads": "t", "machine": MACHINE, "versions": VERSIONS, "results": [row, everything]}


@pytest.mark.parametrize(("error", "goal"), [(0.0912, "9%, missed"), (0.09, "9%")])
def test_a_missed_goal_is_stated(error: float, goal: str) -> None:
    assert f"| MPT | 3 | mean {error:.2%} | {goal} | 90% |" in page(record(error))


def test_sets_without_a_row_are_stated() -> None:
    missing = page(record(0.05)).split("## Not in this record")[1]
    assert "- `cpu`:" in missing and "- `memory`:" in missing and "- `mpt`:" not in missing
