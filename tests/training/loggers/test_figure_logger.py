"""Loggers beside real trainings: with their real libraries, with failures, and through a resume."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.errors import TaskError
from hotloop.task import override_fields
from hotloop.training.loggers import adapters
from tests.support.programs import a_task


class Recorded:
    """An adapter that fails a number of times, and remembers what it got."""

    failures = 0
    fails_at = "log"
    records_before_failure = False
    got: list[tuple[int, dict[str, float]]]
    opened: list[str]
    closed: list[str]

    def open(self, run: Path, settings: dict[str, Any], known_id: str) -> str:
        self._fail("open")
        Recorded.opened.append(known_id)
        return known_id or "new"

    def last_step(self) -> int | None:
        return max((step for step, _ in Recorded.got), default=-1)

    def log(self, step: int, figures: dict[str, float]) -> None:
        if Recorded.records_before_failure and Recorded.failures:
            Recorded.got.append((step, figures))
        self._fail("log")
        Recorded.got.append((step, figures))

    def close(self, reason: str) -> None:
        self._fail("close")
        Recorded.closed.append(reason)

    def _fail(self, at: str) -> None:
        if Recorded.failures and Recorded.fails_at == at:
            Recorded.failures -= 1
            raise SystemExit("the server is gone\nfor long")


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.failures, Recorded.got, Recorded.opened, Recorded.closed = 0, [], [], []
    Recorded.fails_at, Recorded.records_before_failure = "log", False
    monkeypatch.setitem(adapters.ADAPTERS, "mlflow", Recorded)
    monkeypatch.setattr(adapters, "_is_installed", lambda name: True)
    return Recorded


def train(path: Path, name: str = "mlflow", **options: Any) -> hotloop.Run:
    epochs = options.pop("epochs", 3)
    task = a_task(epochs=epochs, loggers=[name], validation=0.25)
    return hotloop.fit(task, run=path, progress=False, **options)


def test_each_epoch_is_sent_once_and_the_record_is_closed(tmp_path: Path, recorded: type[Recorded]) -> None:
    run = train(tmp_path / "run")
    assert [step for step, _ in recorded.got] == [row["step"] for row in run.epochs]
    assert [figures["validation_loss"] for _, figures in recorded.got] == [row["validation_loss"] for row in run.epochs]
    assert recorded.opened == [""] and recorded.closed == ["finished"]


def test_a_resumed_run_goes_on_in_the_record_without_doubled_steps(tmp_path: Path, recorded: type[Recorded]) -> None:
    train(tmp_path / "run")
    train(tmp_path / "run", epochs=5, resume=True)
    steps = [step for step, _ in recorded.got]
    assert steps == sorted(set(steps)) and len(steps) == 5
    assert recorded.opened == ["", "new"]


def test_a_logger_that_fails_is_one_line_and_is_tried_again(
    tmp_path: Path, recorded: type[Recorded], capfd: pytest.CaptureFixture[str]
) -> None:
    recorded.failures = 1
    run = hotloop.fit(a_task(epochs=3, loggers=["mlflow"]), run=tmp_path / "run")
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("mlflow failed (SystemExit: the server is gone)") == 1
    assert [step for step, _ in recorded.got] == [row["step"] for row in run.epochs]


@pytest.mark.parametrize("fails_at", ["open", "log", "close"])
@pytest.mark.parametrize("failures", [1, 10**6])
def test_a_failure_at_any_call_is_one_line_and_ends_no_training(
    tmp_path: Path, recorded: type[Recorded], capfd: pytest.CaptureFixture[str], fails_at: str, failures: int
) -> None:
    recorded.fails_at, recorded.failures = fails_at, failures
    run = hotloop.fit(a_task(epochs=3, loggers=["mlflow"]), run=tmp_path / "run")
    assert run.reason == "finished" and len(run.epochs) == 3
    said = " ".join(capfd.readouterr().err.split())
    is_lasting = failures > 1
    assert said.count("the server is gone") == (0 if fails_at == "close" and not is_lasting else 1)
    assert ("mlflow lacks 3 epochs" in said) == (is_lasting and fails_at != "close")
    if fails_at == "close" or not is_lasting:
        assert [step for step, _ in recorded.got] == [row["step"] for row in run.epochs]
    assert recorded.closed == ([] if is_lasting else ["finished"])


def test_figures_that_were_recorded_before_an_error_are_sent_once(tmp_path: Path, recorded: type[Recorded]) -> None:
    recorded.failures, recorded.records_before_failure = 1, True
    run = train(tmp_path / "run")
    assert [step for step, _ in recorded.got] == [row["step"] for row in run.epochs]


def test_a_resumed_run_sends_what_the_record_lacks(tmp_path: Path, recorded: type[Recorded]) -> None:
    recorded.failures = 10**6
    train(tmp_path / "run")
    recorded.failures = 0
    run = train(tmp_path / "run", epochs=4, resume=True)
    assert [step for step, _ in recorded.got] == [row["step"] for row in run.epochs] and len(run.epochs) == 4


@pytest.mark.parametrize("content", ["{", "[]", '{"mlflow": 1}', '{"mlflow": {"id": 7, "step": "x"}}'])
def test_a_damaged_note_of_the_record_begins_a_new_record(
    tmp_path: Path, recorded: type[Recorded], content: str
) -> None:
    train(tmp_path / "run")
    (tmp_path / "run" / "loggers.json").write_text(content)
    run = train(tmp_path / "run", epochs=4, resume=True)
    assert recorded.opened == ["", ""] and run.reason == "finished"


def test_loggers_of_the_command_line_are_added_to_those_of_the_task() -> None:
    assert override_fields(a_task(loggers=["csv"]), {"loggers": ["mlflow", "csv"]}).loggers == ["csv", "mlflow"]


def test_a_failing_tensorboard_is_one_line_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils import tensorboard

    real, failures = tensorboard.SummaryWriter, [1, 1]

    def failing(*given: Any, **options: Any) -> Any:
        if failures:
            failures.pop()
            raise OSError("no space left")
        return real(*given, **options)

    monkeypatch.setattr(tensorboard, "SummaryWriter", failing)
    run = hotloop.fit(a_task(epochs=3), run=tmp_path / "run")
    assert " ".join(capfd.readouterr().err.split()).count("tensorboard failed (OSError: no space left)") == 1
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss/train")] == [row["step"] for row in run.epochs]


def test_a_wrong_name_and_a_missing_package_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match=r"no logger 'wandbb'.*Did you mean 'wandb'"):
        train(tmp_path / "run", "wandbb")
    monkeypatch.setattr(adapters, "_is_installed", lambda name: False)
    with pytest.raises(TaskError, match="pip install trackio"):
        train(tmp_path / "run", "trackio")
    with pytest.raises(TaskError, match="expected a list of names"):
        hotloop.fit(a_task(loggers="csv"), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_csv(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "csv")
    train(tmp_path / "run", "csv", epochs=4, resume=True)
    with (run.path / "figures.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["figure"] == "train_loss"]
    assert [float(row["value"]) for row in rows] == [row["train_loss"] for row in hotloop.Run.open(run.path).epochs]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow, which make test-all installs", exc_type=ImportError)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(address)
    monkeypatch.setitem(adapters.ADAPTERS, "mlflow", adapters.MlflowRun)
    run = train(tmp_path / "run")
    train(tmp_path / "run", epochs=5, resume=True)
    client = mlflow.MlflowClient(address)
    experiment = client.get_experiment_by_name("hotloop")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["batch_size"] == "5"
    points = [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, "train_loss")]
    epochs = hotloop.Run.open(run.path).epochs
    assert sorted(points) == [(row["step"], row["train_loss"]) for row in epochs]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb, which make test-all installs", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setitem(adapters.ADAPTERS, "wandb", adapters.WandbRun)
    run = train(tmp_path / "run", "wandb")
    assert len(run.epochs) == 3
    stored = json.loads((run.path / "loggers.json").read_text())["wandb"]
    assert stored["step"] == run.epochs[-1]["step"]
    assert len(list(run.path.glob(f"wandb/offline-run-*-{stored['id']}"))) == 1
    time.sleep(1.1)  # wandb's folders are named by the second
    train(tmp_path / "run", "wandb", epochs=4, resume=True)
    assert len(list(run.path.glob(f"wandb/offline-run-*-{stored['id']}"))) == 2

    monkeypatch.chdir(tmp_path)  # the working folder of wandb's service stays another one
    other = train(Path("other"), "wandb")
    stored = json.loads((other.path / "loggers.json").read_text())["wandb"]
    assert stored["step"] == other.epochs[-1]["step"]
    assert len(list((tmp_path / "other").glob("wandb/offline-run-*/run-*.wandb"))) == 1


def test_trackio_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs trackio, which make test-all installs", exc_type=ImportError)
    monkeypatch.setitem(adapters.ADAPTERS, "trackio", adapters.TrackioRun)
    run = train(tmp_path / "run", "trackio")
    train(tmp_path / "run", "trackio", epochs=5, resume=True)
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("hotloop")
    rows = SQLiteStorage.get_logs("hotloop", name)
    losses = [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row]
    assert losses == [(row["step"], row["train_loss"]) for row in hotloop.Run.open(run.path).epochs]
