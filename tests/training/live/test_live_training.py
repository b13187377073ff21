"""What stays as it is when a training changes its plan: events, figures, limits, and what a resume accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.callback import View
from hotloop.core.records.training import EpochRecord
from hotloop.errors import RunError
from hotloop.lowering.build import lower
from hotloop.lowering.evaluation import evaluate
from hotloop.plan import Plan
from hotloop.training import monitor
from hotloop.training.run import Run
from tests.support.live_runs import differences, patch_search, switches
from tests.support.programs import advance, labelled
from tests.support.tasks.full_state_task import STEPS_PER_EPOCH, task

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def searching(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_search(monkeypatch.setattr)
    monkeypatch.setattr(monitor, "STATUS_INTERVAL_S", 0.0)


def fit(path: Path, **options: Any) -> Run:
    return hotloop.fit(task(6), run=path, progress=False, **options)


def test_callbacks_get_each_step_once(tmp_path: Path) -> None:
    views: list[View] = []

    def note(view: View) -> None:
        views.append(view)

    note.read_only = True  # type: ignore[attr-defined]
    fit(tmp_path / "run", plan="auto", callbacks=[note])
    steps = [view.step for view in views if view.event in ("progress", "epoch")]
    assert steps == list(range(1, 6 * STEPS_PER_EPOCH + 1))
    assert [view.epoch for view in views if view.event == "epoch"] == [1, 2, 3, 4, 5, 6]
    assert len(switches(tmp_path / "run")) > 3


def test_each_line_of_progress_has_the_norm_of_its_own_program(tmp_path: Path) -> None:
    unclipped = hotloop.task.override_fields(task(6), {"clip_norm": None})
    hotloop.fit(unclipped, run=tmp_path / "run", plan="auto", progress=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    norms = {row["step"]: row["gradient_norm"] for row in rows}
    assert len(norms) > 50 and all(math.isfinite(norm) for norm in norms.values())
    assert len(set(norms.values())) == len(norms), "a norm is that of a program whose steps have ended"


def test_the_accuracy_on_training_data_is_that_of_the_program_in_use() -> None:
    x, y = labelled(64)
    own = hotloop.Task(
        model=lambda: nn.Linear(6, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        data=(x, y),
        validation=(x, y),
        batch_size=8,
    )
    first, second = lower(own, Plan()), lower(own, Plan(optimizer="forloop"))
    advance(second, 20)
    watch = monitor.monitor_of(first, lambda line: None)
    watch.follow(second)
    record = EpochRecord(
        epoch=1,
        step=1,
        train={},
        validation={"accuracy": 0.5},
        learning_rate=0.1,
        samples=64,
        seconds=1.0,
        samples_per_s=1.0,
    )
    assert watch._training_accuracy is not None
    after = evaluate(second, second.parts.splits.train).values["accuracy"]
    assert watch._training_accuracy(record) == pytest.approx(after)
    assert after != evaluate(first, first.parts.splits.train).values["accuracy"]


def test_a_time_limit_stops_a_run_that_switches(tmp_path: Path) -> None:
    run = hotloop.fit(task(100_000), run=tmp_path / "run", plan="auto", progress=False, stop_after="3s")
    assert run.reason == "stop-after"
    assert len(switches(tmp_path / "run")) > 1  # how many depends on the machine's load


def test_a_finished_run_is_continued_by_more_epochs(tmp_path: Path) -> None:
    fit(tmp_path / "run", plan="auto")
    before = switches(tmp_path / "run")
    hotloop.fit(task(8), run=tmp_path / "run", resume=True, progress=False, plan="auto")
    assert switches(tmp_path / "run")[: len(before)] == before
    fit(tmp_path / "again", plan=f"replay:{tmp_path / 'run'}")
    hotloop.fit(task(8), run=tmp_path / "again", resume=True, progress=False)
    assert differences(tmp_path / "run", tmp_path / "again") == []


def test_auto_goes_on_with_the_search_of_a_run_on_the_same_device(tmp_path: Path) -> None:
    fit(tmp_path / "run", plan="auto")
    hotloop.fit(task(8), run=tmp_path / "run", resume=True, progress=False, plan="auto", device="cpu")
    reasons = [row["reason"] for row in Run.open(tmp_path / "run").journal() if row["event"] == "plan_switch"]
    assert reasons and "the run was resumed with this plan" not in reasons


def test_a_run_of_one_plan_stays_so_when_it_is_resumed_with_auto(tmp_path: Path) -> None:
    fit(tmp_path / "run", plan=Plan())
    hotloop.fit(task(8), run=tmp_path / "run", resume=True, progress=False, plan="auto")
    assert switches(tmp_path / "run") == []


def test_without_auto_there_is_no_switch(tmp_path: Path) -> None:
    for name, plan in (("default", None), ("baseline", "baseline")):
        fit(tmp_path / name, plan=plan)
        assert switches(tmp_path / name) == []


def test_a_replay_that_was_killed_while_it_copied_the_plans_is_not_resumed(tmp_path: Path) -> None:
    fit(tmp_path / "run", plan="auto")
    fit(tmp_path / "again", plan=f"replay:{tmp_path / 'run'}")
    journal = tmp_path / "again" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:2]))
    for checkpoint in (tmp_path / "again" / "checkpoints").glob("step-*"):
        checkpoint.unlink()
    with pytest.raises(RunError, match="start the run again"):
        hotloop.fit(task(6), run=tmp_path / "again", resume=True, progress=False)


def test_a_run_that_was_killed_before_its_start_searches_after_the_resume(tmp_path: Path) -> None:
    fit(tmp_path / "run", plan="auto", stop_after="0.001s")
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if '"start"' in line)
    assert [json.loads(line)["event"] for line in lines[:place]] == ["plan_search", "plan_switch"]
    journal.write_text("".join(lines[:place]))
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        checkpoint.unlink()
    hotloop.fit(task(6), run=tmp_path / "run", resume=True, progress=False)
    assert len(switches(tmp_path / "run")) > 3
