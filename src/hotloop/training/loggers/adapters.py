"""Adapters of MLflow, Weights & Biases, Trackio, and a CSV file.

Each adapter opens a record, appends figures of steps, and closes the record. An adapter raises what its library raises:
`FigureLogger` handles failures.
"""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hotloop.errors import TaskError, did_you_mean

PROJECT = "hotloop"
"""Project or experiment, unless the library's environment variable names another."""


class Adapter(Protocol):
    """The record of one run in a library."""

    def open(self, run: Path, settings: Mapping[str, Any], known_id: str) -> str:
        """Opens the record `known_id` again, or a new record for an empty id; returns the id."""

    def last_step(self) -> int | None:
        """Returns the last step in the open record; -1 for an empty record, None if the library can't tell."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self, reason: str) -> None:
        """Closes the record; `reason` is why the training stopped, empty after a failure."""


class CsvLog:
    """Appends to `<run>/figures.csv`: a line for each figure of each step."""

    def open(self, run: Path, settings: Mapping[str, Any], known_id: str) -> str:
        self._path = run / "figures.csv"
        return self._path.name

    def last_step(self) -> int | None:
        if not self._path.is_file():
            return -1
        with self._path.open(newline="") as file:
            return max((int(row["step"]) for row in csv.DictReader(file) if _is_of_epoch(row["figure"])), default=-1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not file.tell():
                writer.writerow(("time", "step", "figure", "value"))
            now = round(time.time(), 3)
            writer.writerows((now, step, name, value) for name, value in figures.items())

    def close(self, reason: str) -> None:
        pass


class MlflowRun:
    """A run of MLflow's tracking; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where."""

    def open(self, run: Path, settings: Mapping[str, Any], known_id: str) -> str:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if known_id:
            self._client.update_run(known_id, status="RUNNING")
            self._id = known_id
            return known_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        for key, value in settings.items():
            self._client.log_param(self._id, key, str(value)[:500])
        return self._id

    def last_step(self) -> int | None:
        names = filter(_is_of_epoch, self._client.get_run(self._id).data.metrics)
        points = [point for name in names for point in self._client.get_metric_history(self._id, name)]
        return max((int(point.step) for point in points), default=-1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now_ms, step) for name, value in figures.items()])

    def close(self, reason: str) -> None:
        status = "FINISHED" if reason else "FAILED"
        self._client.set_terminated(self._id, status)


class WandbRun:
    """A run of Weights & Biases; with WANDB_MODE=offline a resumed run is a second, complete folder of the same id."""

    def open(self, run: Path, settings: Mapping[str, Any], known_id: str) -> str:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=known_id or None,
            resume="allow",
            config=dict(settings),
            dir=str(run.resolve()),  # a service that an earlier process of wandb started has another working folder
            reinit="create_new",
        )
        return str(self._run.id)

    def last_step(self) -> int | None:
        # A kill loses the figures that wandb had in memory, so the second offline folder gets all epochs.
        return -1 if self._run.offline else None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, reason: str) -> None:
        self._run.finish(exit_code=0 if reason else 1)


class TrackioRun:
    """A run of Trackio, in its local database; TRACKIO_DIR says where."""

    def open(self, run: Path, settings: Mapping[str, Any], known_id: str) -> str:
        import trackio

        name = known_id or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(
            project=project, name=name, config=dict(settings), resume="allow", embed=False, auto_log_gpu=False
        )
        return name

    def last_step(self) -> int | None:
        # A killed training loses the figures that Trackio's thread had not written. Trackio 0.43 has no public function.
        step = getattr(self._run, "_next_step", None)
        return None if step is None else int(step) - 1

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, reason: str) -> None:
        self._run.finish()


ADAPTERS: dict[str, type[Adapter]] = {"csv": CsvLog, "mlflow": MlflowRun, "wandb": WandbRun, "trackio": TrackioRun}

NAMES = ("tensorboard", *ADAPTERS)
"""TensorBoard has a callback of its own, which runs wherever TensorBoard is installed."""


def check_loggers(names: Any) -> None:
    """Raises TaskError for an unknown logger, or one whose library isn't installed."""
    if isinstance(names, str) or not isinstance(names, list | tuple):
        raise TaskError(f"loggers is {names!r}", expected="a list of names, such as ['mlflow']")
    for name in names:
        if name not in NAMES:
            raise TaskError(
                f"there is no logger {name!r}",
                expected=f"some of {', '.join(NAMES)}",
                fix=did_you_mean(str(name), NAMES) or "check the spelling",
            )
        if name != "csv" and not _is_installed(name):
            raise TaskError(f"the logger {name} needs a package that isn't installed", fix=f"run: pip install {name}")


def _is_installed(name: str) -> bool:
    """Returns whether there is such a package; a folder `wandb` or `mlflow` with records is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _is_of_epoch(figure: str) -> bool:
    return not figure.startswith("test_")


def finite(figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures that are finite numbers."""
    numbers = {key: value for key, value in figures.items() if isinstance(value, int | float)}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
