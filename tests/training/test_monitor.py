"""What a training records for reports: its rows, its state, its failure; and that recording never ends a training."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.core.files.run_folder import StoredRun
from hotloop.errors import HotloopError
from hotloop.training import monitor
from tests.support.programs import a_task


@pytest.fixture(autouse=True)
def each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records at each event, which take far less than a second here."""
    monkeypatch.setattr(monitor, "STATUS_INTERVAL_S", 0.0)
    monkeypatch.setattr(monitor, "SYSTEM_INTERVAL_S", 0.01)


def test_a_training_leaves_what_a_report_shows(tmp_path: Path) -> None:
    hotloop.fit(a_task(epochs=3, validation=0.25), run=tmp_path / "run", progress=False)
    run = StoredRun.read(tmp_path / "run")
    assert run.damages == [] and run.state == "finished"
    assert [row["step"] for row in run.progress] == sorted({row["step"] for row in run.progress})
    last = run.progress[-1]
    assert last["step"] == run.epochs[-1]["step"] and last["learning_rate"] == 0.1 and last["gradient_norm"] > 0
    assert run.layers is not None
    assert [(row.kind, row.parameters, row.output, row.flops) for row in run.layers.rows] == [
        ("Linear", 21, [[2, 3]], 72.0)
    ]
    assert run.system and run.system[-1]["memory_bytes"] > 1e6
    assert not [thread for thread in threading.enumerate() if thread.name == "hotloop-monitor"]


def test_recording_changes_no_bit_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        )

    task = a_task(model=model, epochs=2)
    recorded = hotloop.fit(task, run=tmp_path / "recorded", progress=False)
    monkeypatch.setattr(monitor.RunMonitor, "__call__", lambda self, view: None)
    plain = hotloop.fit(task, run=tmp_path / "plain", progress=False)
    assert [row["train_loss"] for row in recorded.epochs] == [row["train_loss"] for row in plain.epochs]


def test_a_resumed_training_adds_no_step_twice(tmp_path: Path) -> None:
    hotloop.fit(a_task(epochs=2), run=tmp_path / "run", progress=False)
    hotloop.fit(a_task(epochs=4), run=tmp_path / "run", progress=False, resume=True)
    steps = [row["step"] for row in StoredRun.read(tmp_path / "run").progress]
    assert steps == sorted(set(steps)) and steps[-1] == 20


def test_files_that_cannot_be_written_end_no_training(tmp_path: Path) -> None:
    def obstruct(view: hotloop.View) -> None:
        if view.event == "start":
            for name in ("status.json", "progress.jsonl", "system.jsonl", "layers.json"):
                (view.run / name).unlink(missing_ok=True)
                (view.run / name).mkdir()

    run = hotloop.fit(a_task(epochs=2), run=tmp_path / "run", progress=False, callbacks=[obstruct])
    assert len(run.epochs) == 2
    assert StoredRun.read(run.path).damages


def test_a_failure_is_recorded_with_its_fix(tmp_path: Path) -> None:
    def fail(view: hotloop.View) -> None:
        if view.event == "epoch":
            raise ValueError("no more")

    with pytest.raises(HotloopError) as caught:
        hotloop.fit(a_task(epochs=2), run=tmp_path / "run", progress=False, callbacks=[fail], checkpoint_every="1")
    run = StoredRun.read(tmp_path / "run")
    assert run.state == "failed" and run.last["message"] == str(caught.value)


def test_the_journal_says_why_the_plan_was_chosen(tmp_path: Path) -> None:
    hotloop.fit(a_task(), run=tmp_path / "run", plan="auto", progress=False)
    start = json.loads((tmp_path / "run/journal.jsonl").read_text().splitlines()[0])
    assert any(line.startswith("auto") for line in start["plan_reasons"]) and start["machine"]
