"""What a training records for reports: its rows, its state, its failure; and that recording never ends a training."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hotloop
from hotloop.core.files.run_folder import StoredRun
from hotloop.core.state import differing_paths
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from hotloop.training import monitor
from tests.support.processes.resumed_training import last_checkpoint
from tests.support.programs import a_task, labelled


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

    task = a_task(model=model, epochs=3, validation=0.25)
    recorded = hotloop.fit(task, run=tmp_path / "recorded", progress=False)
    assert StoredRun.read(recorded.path).has_sampled_accuracy
    monkeypatch.setattr(monitor.RunMonitor, "__call__", lambda self, view: None)
    plain = hotloop.fit(task, run=tmp_path / "plain", progress=False)
    assert not StoredRun.read(plain.path).has_sampled_accuracy
    first, second = (last_checkpoint(run).state for run in (recorded, plain))
    assert differing_paths(first, second) == []
    for name in ("train_loss", "validation_loss"):
        assert [row[name] for row in recorded.epochs] == [row[name] for row in plain.epochs]


def test_the_training_accuracy_is_that_of_the_training_data(tmp_path: Path) -> None:
    """The sample is all of this small data; the model doesn't learn, so that each epoch has the same accuracy."""
    x, y = labelled(30)
    task = a_task(data=(x, y), validation=labelled(10), epochs=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    run = hotloop.fit(task, run=tmp_path / "run", progress=False)
    expected = (run.task.build_model()(x).argmax(1) == y).float().mean().item()
    rows = StoredRun.read(run.path).epochs
    found = {row["epoch"]: row["train_accuracy"] for row in rows if "train_accuracy" in row}
    assert found == pytest.approx({1: expected, 3: expected})  # each 100th epoch, the first and the last
    assert "train_accuracy" not in run.epochs[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},  # no validation data
        {"validation": 0.25, "metrics": {"error": lambda output, target: 1.0}},
        {"validation": 0.25, "data": list(zip(*labelled(), strict=True))},  # a map-style data set
    ],
)
def test_other_tasks_have_no_training_accuracy(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = hotloop.fit(a_task(epochs=1, **fields), run=tmp_path / "run", progress=False)
    assert not StoredRun.read(run.path).has_sampled_accuracy


def test_an_accuracy_that_fails_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("hotloop.training.monitor.evaluate", fail)
    run = hotloop.fit(a_task(epochs=3, validation=0.25), run=tmp_path / "run")
    assert len(run.epochs) == 3
    assert capsys.readouterr().err.count("accuracy on training data can't be measured (out of memory)") == 1


def test_compiled_steps_have_no_gradient_norm(tmp_path: Path) -> None:
    run = hotloop.fit(a_task(epochs=2), run=tmp_path / "run", plan=Plan(compile="step"), progress=False)
    assert {row["gradient_norm"] for row in StoredRun.read(run.path).progress} == {None}


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
