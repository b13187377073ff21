"""`hotloop summary`: a Task's file and a run's folder, as a table and as JSON; mistakes in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.core.records.model_summary import ModelSummary
from tests.support.processes.in_process_command import SMALL, Hotloop, commands

NESTED = "nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3))"


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    (tmp_path / "task.py").write_text(
        f"{SMALL}def task(epochs: int = 1):\n    print('made')\n    return make(model=lambda: {NESTED}, epochs=epochs)\n"
    )
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


def test_a_task_and_its_run_have_the_same_summary(hotloop: Hotloop) -> None:
    done = hotloop("summary", "task.py", "--json", "-p", "epochs=2")
    assert done.code == 0 and "made" in done.err
    summary = ModelSummary(**done.document)
    assert [row.name for row in summary.rows] == ["", "0", "0.0", "0.1", "1"]
    assert summary.parameters == 4 * 8 + 8 + 8 * 3 + 3
    assert hotloop("train", "task.py", "--run", "run", "--plan", "baseline").code == 0
    assert hotloop("summary", "run", "--json").document == done.document


def test_the_table_and_its_depth(hotloop: Hotloop) -> None:
    whole, folded = hotloop("summary", "task.py"), hotloop("summary", "task.py", "--depth", "1", "--batch-size", "2")
    assert (whole.code, whole.out) == (0, "made\n")
    words = " ".join(whole.err.split())
    assert "task: a batch of 5x4, 5" in words and "0 (Linear) 5x8 40 320 FLOP" in words
    assert "Parameters: 67: 67 trainable, 0 frozen." in words
    assert "a batch of 2x4, 2" in folded.err and "0 (Sequential) 2x8 40 128 FLOP" in " ".join(folded.err.split())
    assert "ReLU" in whole.err and "ReLU" not in folded.err
    rows = hotloop("summary", "task.py", "--depth", "1", "--json").document["rows"]
    assert [(row["name"], row["parameters"]) for row in rows] == [("", 0), ("0", 40), ("1", 27)]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nowhere.py",), 1, "no file nowhere.py"),
        (("runs/first",), 1, "runs/first doesn't exist; expected a folder that `hotloop train` made"),
        (("empty",), 1, "empty is not a run"),
        (("task.py", "--batch-size", "0"), 2, "--batch-size is 0; expected 1 or more"),
        (("task.py", "--depth", "-1"), 2, "--depth is -1; expected 0 or more"),
        (("empty", "-p", "epochs=2"), 2, "--param is for a Task's file"),
        (("task.py:other",), 1, "no Task named 'other'"),
        (("fails.py",), 1, "mat1 and mat2 shapes cannot be multiplied"),
        (("normed.py", "--batch-size", "1"), 1, "more than 1 value per channel"),
    ],
)
def test_mistakes_are_one_line(arguments, code, says, hotloop: Hotloop, tmp_path: Path) -> None:
    Path("empty").mkdir()
    (tmp_path / "fails.py").write_text(f"{SMALL}task = make(model=lambda: nn.Linear(5, 3), loss=nn.MSELoss())\n")
    normed = "nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))"
    (tmp_path / "normed.py").write_text(f"{SMALL}task = make(model=lambda: {normed})\n")
    done = hotloop("summary", *arguments, "--json")
    assert done.code == code
    assert says in done.document["error"]["message"]
    assert "Traceback" not in done.err
