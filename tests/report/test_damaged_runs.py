"""Runs whose files were damaged or changed by hand: what can be shown is shown, and no reader raises."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from hotloop.core.files.run_folder import StoredRun
from hotloop.report.live_server import LiveRuns
from hotloop.report.notebook import run_html
from hotloop.report.run_comparison import compare_runs, comparison_report
from hotloop.report.run_list import SORT_KEYS, list_runs, runs_table, sorted_rows
from hotloop.report.run_report import run_report
from hotloop.training.early_stopping import PAUSED
from tests.support.stored_runs import write_run

ODD = [
    "null",
    '"x"',
    "-1",
    "1e400",
    "NaN",
    "[]",
    "{}",
    "true",
    "1e308",
    '"<b>"',
    "99999999999999999999999",
    '"inf"',
    r'"\ud800"',
]

EPOCHS = [
    {"epoch": n, "step": 4 * n, "train_loss": 1 / n, "validation_loss": 2 / n, "seconds": 1.0, "samples_per_s": 10.0}
    for n in (1, 2, 3)
]
PROGRESS = [
    {"time": float(n), "step": n, "epoch": n // 4, "batch": n % 4, "batches": 4, "loss": 0.5, "train_accuracy": 0.5}
    for n in range(1, 9)
]
SYSTEM = [{"time": float(n), "cpu_percent": 5.0, "memory_bytes": 1e6, "gpu0_percent": 4.0} for n in range(4)]
STATUS = {"pid": 1, "process_created": 1.0, "host": "h", "time": 1.0, "epoch": 1, "epochs": 3, "step": 4, "loss": 0.5}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = write_run(tmp_path / "runs/good", epochs=EPOCHS, status=STATUS)
    for name, rows in (("progress.jsonl", PROGRESS), ("system.jsonl", SYSTEM)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_all(folder: Path, *runs: Path) -> None:
    """Reads the runs as each command does."""
    stored = [StoredRun.read(path) for path in runs]
    for run in stored:
        run_report(run)
        run_html(run)
    comparison_report(compare_runs(stored), stored)
    rows = list_runs(folder)
    for key in SORT_KEYS:
        runs_table(sorted_rows(rows, key))
    json.dumps(LiveRuns(folder).snapshot(), allow_nan=False)
    LiveRuns(folder).is_training()


def damaged(text: str, draws: random.Random) -> str:
    """Replaces values, cuts the text, or puts a character into it."""
    values = list(re.finditer(r'(?<=: )("[^"]*"|[-\d.e+]+|true|false|null)', text))
    kind = draws.random()
    if kind < 0.75 and values:
        found = draws.choice(values)
        return text[: found.start()] + draws.choice(ODD) + text[found.end() :]
    place = draws.randrange(len(text) + 1)
    return text[:place] if kind < 0.85 else text[:place] + draws.choice('\0{\n",9') + text[place:]


@pytest.mark.parametrize("seed", range(4))
def test_no_reader_raises(good: Path, tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    for _ in range(10):
        bad = tmp_path / "runs/bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        for file in sorted(bad.iterdir()):
            text = file.read_text()
            for _ in range(draws.choice([0, 0, 1, 2, 4])):
                text = damaged(text, draws)
            file.write_text(text, errors="replace")
        read_all(tmp_path / "runs", bad, good)


@pytest.mark.parametrize("name", ["plan.toml", "journal.jsonl", "metrics.jsonl", "progress.jsonl", "status.json"])
def test_a_missing_file_leaves_the_others(good: Path, tmp_path: Path, name: str) -> None:
    (good / name).unlink()
    read_all(tmp_path / "runs", good, good)
    page = run_report(StoredRun.read(good))
    assert "40 samples" in page and ("sgd" in page.lower())


def test_a_truncated_journal_shows_the_events_before(good: Path) -> None:
    journal = good / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    run = StoredRun.read(good)
    assert [event["event"] for event in run.events] == ["start", "stop"] and run.state == "finished"
    assert len(run.epochs) == 3 and "finished" in run_report(run)


def test_why_there_is_no_gradient_norm(good: Path) -> None:
    assert "The gradient norm isn&#39;t recorded: gradients aren&#39;t stored after a step" in run_report(
        StoredRun.read(good)
    )
    text = (good / "plan.toml").read_text().replace('compile = "none"', 'compile = "step"')
    (good / "plan.toml").write_text(text)
    assert "under a plan with compile=step" in run_report(StoredRun.read(good))


def test_an_accuracy_of_a_sample_is_shown_as_such(good: Path) -> None:
    run = StoredRun.read(good)
    assert [row.get("train_accuracy") for row in run.epochs] == [0.5, 0.5, None]
    assert "accuracy on training data is of a fixed sample" in run_report(run)


@pytest.mark.parametrize(("file", "field"), [("journal.jsonl", "time"), ("metrics.jsonl", "train_loss")])
@pytest.mark.parametrize("text", ["inf", "nan"])
def test_a_text_of_a_number_that_is_not_finite_stands_for_no_number(
    good: Path, tmp_path: Path, file: str, field: str, text: str
) -> None:
    rows = [json.loads(line) for line in (good / file).read_text().splitlines()]
    rows[-1][field] = text
    (good / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    read_all(tmp_path / "runs", good, write_run(tmp_path / "other", epochs=EPOCHS))


def test_a_paused_trial_of_a_study_counts_as_stopped(tmp_path: Path) -> None:
    events = [{"event": "start", "time": 1.0, "step": 0}, {"event": "stop", "time": 2.0, "step": 4, "reason": PAUSED}]
    run = StoredRun.read(write_run(tmp_path / "trial", epochs=EPOCHS[:1], events=events))
    assert run.state == "stopped"
