"""The bench of scripts pairs runs and compares output and exit codes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.run_scripts import differences, geometric_mean, measure, read_scripts


def test_a_list_names_scripts_with_arguments(tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text('[first]\nscript = "folder/train.py"\narguments = ["--epochs", 2]\n')
    (script,) = read_scripts([tmp_path / "list.toml"])
    assert (script.name, script.path, script.arguments) == (
        "first",
        tmp_path / "folder" / "train.py",
        ("--epochs", "2"),
    )
    assert script.folder == tmp_path / "folder"


@pytest.mark.parametrize(
    ("plain", "hosted", "expected"),
    [
        ("loss 1.50\n", "loss 1.50\n", (True, 0.0)),
        ("loss 1.50\n", "loss 1.20\n", (True, pytest.approx(0.2))),
        ("loss 1.50\n", "error 1.50\n", (False, math.inf)),
        ("loss 1.50\n", "loss 1.50 1\n", (False, math.inf)),
    ],
)
def test_differences_of_text_and_of_numbers(plain: str, hosted: str, expected: tuple[bool, float]) -> None:
    assert differences(plain, hosted) == expected


def test_the_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0) and geometric_mean([]) is None


def test_a_pair_of_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('loss', 0.5, len(sys.argv)); sys.exit(3)")
    row = measure(read_scripts([script])[0], 1, [])
    assert row["exit_codes_equal"] and row["stdout_equal"] and row["text_equal"] and row["exchanged"] == []
    assert row["largest_difference"] == 0.0 and row["low"] is None and row["ratio"] > 0
