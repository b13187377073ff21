"""Run folders written by hand, for readers of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotloop.core.records.training import RunRecord, SourceRecord, TaskFacts
from hotloop.plan import Plan


def write_run(
    path: Path,
    *,
    events: list[dict[str, Any]] | None = None,
    epochs: list[dict[str, Any]] | None = None,
    status: dict[str, Any] | None = None,
    plan: Plan | None = None,
    name: str = "tiny",
    created: str = "2026-01-02T03:04:05+0000",
    overrides: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    data: str = "c" * 32,
    unknown_data: list[str] | None = None,
) -> Path:
    """Writes a run of a Task in a file; without `events` it has finished."""
    path.mkdir(parents=True)
    facts = TaskFacts(
        parameters=10,
        trainable=10,
        samples=40,
        batches=4,
        batch_size=10,
        inputs=[[4], []],
        data="Table",
        exact=True,
        fingerprint="f",
        optimizer="SGD",
        steps=12,
    )
    source = SourceRecord(
        file="task.py",
        module="task",
        attribute="task",
        parameters=parameters or {},
        digest="d" * 64,
        reference="task.py",
        origin="/",
    )
    record = RunRecord(
        id=path.name,
        name=name,
        created=created,
        source=source,
        overrides=overrides or {},
        facts=facts,
        data=data,
        unknown_data=unknown_data or [],
        versions={"torch": "2"},
    )
    (path / "run.json").write_text(record.model_dump_json())
    (path / "plan.toml").write_text((plan or Plan()).to_toml())
    finished = [
        {"event": "start", "time": 1.0, "step": 0, "monitor": "validation_loss", "goal": "min"},
        {"event": "stop", "time": 5.0, "step": 12, "reason": "finished"},
        {"event": "final", "time": 5.0, "test_loss": 0.5, "weights": "last", "epoch": 3, "reason": "finished"},
    ]
    _write_lines(path / "journal.jsonl", finished if events is None else events)
    _write_lines(path / "metrics.jsonl", epochs or [])
    if status:
        (path / "status.json").write_text(json.dumps(status))
    return path


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
