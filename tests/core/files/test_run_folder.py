"""What the reader of run folders says of each state, of damaged files and of repeated steps."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotloop.core.files.run_folder import StoredRun, find_runs, is_alive, without_repeated_steps
from hotloop.errors import RunError
from tests.support.stored_runs import write_run


def status(**fields: Any) -> dict[str, Any]:
    created = psutil.Process().create_time()
    return {"pid": os.getpid(), "process_created": created, "host": socket.gethostname(), "time": time.time()} | fields


START = {"event": "start", "time": 10.0, "step": 0, "monitor": "validation_accuracy", "goal": "max"}
STOP = {"event": "stop", "time": 30.0, "step": 9, "reason": "finished"}


@pytest.mark.parametrize(
    ("events", "process", "state"),
    [
        ([START, STOP], {}, "finished"),
        ([START, {**STOP, "reason": "no better validation_loss for 3 epochs"}], {}, "finished"),
        ([START, {**STOP, "reason": "SIGINT"}], {}, "stopped"),
        ([START, {"event": "failure", "message": "x"}], {}, "failed"),
        ([START], status(), "training"),
        ([START, STOP, {**START, "event": "resume"}], status(), "training"),
        ([START], status(process_created=1.0), "killed"),
        ([START], status(host="elsewhere"), "training"),
        ([START], status(host="elsewhere", age_s=1000), "killed"),
        ([START], {}, "killed"),
        ([], {}, "new"),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, events: list[dict], process: dict, state: str) -> None:
    if process:
        process = process | {"time": time.time() - process.get("age_s", 0)}
    write_run(tmp_path / "run", events=events, status=process)
    assert StoredRun.read(tmp_path / "run").state == state


def test_a_process_that_ended_and_was_not_waited_for_is_not_alive() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    created = psutil.Process(child).create_time()
    assert not is_alive(status(pid=child, process_created=created))
    os.waitpid(child, 0)


def test_the_best_epoch_follows_the_monitored_figure(tmp_path: Path) -> None:
    rows = [{"epoch": n, "step": n, "validation_accuracy": value} for n, value in ((1, 0.5), (2, 0.9), (3, 0.7))]
    write_run(tmp_path / "run", events=[START], epochs=rows)
    best = StoredRun.read(tmp_path / "run").best_epoch
    assert best is not None and best["epoch"] == 2


def test_time_between_two_processes_is_no_time_of_training(tmp_path: Path) -> None:
    resumed = [{"event": "resume", "time": 1000.0, "step": 5}, {**STOP, "time": 1007.0}]
    write_run(tmp_path / "run", events=[START, {**STOP, "reason": "SIGINT"}, *resumed])
    assert StoredRun.read(tmp_path / "run").seconds == 27.0


def test_steps_that_a_resumed_training_repeats_count_once() -> None:
    rows = [{"time": t, "step": step} for t, step in enumerate([1, 5, 9, 6, 8, 12])]
    assert [(row["time"], row["step"]) for row in without_repeated_steps(rows)] == [
        (0, 1),
        (1, 5),
        (3, 6),
        (4, 8),
        (5, 12),
    ]


@pytest.mark.parametrize(
    "name", ["run.json", "plan.toml", "journal.jsonl", "metrics.jsonl", "progress.jsonl", "system.jsonl", "layers.json"]
)
@pytest.mark.parametrize("content", [b"\xff\x00{", b'{"a": [1]}\n{"b":\n7}', b"[" * 5000, b"null"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, content: bytes) -> None:
    from hotloop.report.run_report import run_report

    write_run(tmp_path / "run", events=[START, STOP], epochs=[{"epoch": 1, "step": 2, "train_loss": 0.5}])
    (tmp_path / "run" / name).write_bytes(content)
    run = StoredRun.read(tmp_path / "run")
    assert any(name in line for line in run.damages)
    page = run_report(run)
    assert all(line in page for line in run.damages)
    assert name == "journal.jsonl" or "finished" in page


def test_a_folder_without_a_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        StoredRun.read(tmp_path)
    with pytest.raises(RunError, match="doesn't exist"):
        StoredRun.read(tmp_path / "none")
    with pytest.raises(RunError, match="doesn't exist"):
        StoredRun.read(tmp_path / ("x" * 300))


def test_runs_below_a_folder_are_found_once(tmp_path: Path) -> None:
    for name in ("b/second", "a", "b/first"):
        write_run(tmp_path / name, events=[])
    (tmp_path / "a/checkpoints").mkdir()
    (tmp_path / "a/checkpoints/run.json").write_text(json.dumps({}))  # inside a run, so no run
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a", "b/first", "b/second"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]
