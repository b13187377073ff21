"""Runs trials as Ray tasks; on each machine a trial server forks the trials' processes, as without Ray.

All machines share the study's folder. Only the study's own process writes Optuna's storage.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

from hotloop.distributed.ray.cluster import connect
from hotloop.errors import StudyError, describe_error
from hotloop.hyperparameters.trial_processes import STOP_S, TrialProcesses

_POLL_S = 0.2
"""Longest wait without an answer to Ctrl-C in the study, or to Ray's cancellation in a task."""


def run_trial(work: str, log: str, arguments: Mapping[str, Any], folder: str, logs: str, path: Sequence[str]) -> Any:
    """Runs a trial in a process of its own; the work of a Ray task.

    Args:
        folder: the current folder of the study's process.
        logs: for what the trial prints, relative to `folder`.
        path: `sys.path` of the study's process.

    Returns:
        The result, None if the trial's process was killed, or a StudyError.
    """
    if not (Path(folder) / arguments["folder"] / "study.json").is_file():
        return StudyError(
            f"{platform.node()} has no folder {Path(folder) / arguments['folder']}",
            expected="a study on a file system that all machines of the Ray cluster share",
            fix="start the study in a folder that all machines have",
        )
    processes = _trial_processes(folder, logs)
    job = processes.start(work, log, **arguments, path=list(dict.fromkeys([*path, *sys.path])))
    try:
        while not processes.next_finished([job], _POLL_S):
            pass
        return job.result()
    except BaseException:  # Ray has cancelled the task
        processes.stop([job])
        raise


@lru_cache(maxsize=1)
def _trial_processes(folder: str, logs: str) -> TrialProcesses:
    """Returns the trial server of this Ray worker, which ends with the worker."""
    return TrialProcesses(Path(folder) / logs, Path(folder))


class RayTrial:
    """A trial in a Ray task."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self.reference = ray, reference

    def result(self) -> Any:
        """Returns the result, or None if the trial's process, its Ray worker or its machine was killed.

        Raises:
            StudyError: the task failed otherwise.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(self.reference)
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError):
            return None
        except errors.RayError as error:
            raise StudyError(
                f"a Ray task failed: {describe_error(error)}", fix="go on by `hotloop study --resume`"
            ) from error


class RayTrials:
    """Runs trials on a Ray cluster, with one CPU each; a context that disconnects from the cluster.

    Args:
        logs: for what the trials print, in the study's folder.
        jobs: least number of cores of a cluster that is started on this machine.
        has_gpu: whether each trial has a GPU.

    Raises:
        PlanError: Ray isn't installed, or can't be reached.
    """

    def __init__(self, logs: Path, jobs: int | None, has_gpu: bool) -> None:
        self._logs, self._jobs = logs, jobs or 1
        self._options = {"num_cpus": 1, "num_gpus": int(has_gpu), "max_retries": 0}

    def __enter__(self) -> RayTrials:
        with redirect_stdout(sys.stderr):
            self._ray = connect(self._jobs)
        self._task = self._ray.remote(**self._options)(run_trial)
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    @property
    def cores(self) -> int:
        """The cores of the cluster."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self, work: str, log: str, **arguments: Any) -> RayTrial:
        folder, logs = os.getcwd(), str(self._logs)
        return RayTrial(self._ray, self._task.remote(work, log, arguments, folder, logs, list(sys.path)))

    def next_finished(self, jobs: Iterable[RayTrial]) -> list[RayTrial]:
        """Waits until a trial has ended, and returns those that have."""
        waiting = {job.reference: job for job in jobs}
        ended: list[Any] = []
        while not ended:
            ended, _ = self._ray.wait(list(waiting), timeout=_POLL_S)
        return [waiting[reference] for reference in ended]

    def stop(self, jobs: Iterable[RayTrial]) -> None:
        """Makes trials save and end; a trial that doesn't is killed with its Ray worker."""
        references = [job.reference for job in jobs]
        for reference in references:
            self._ray.cancel(reference)
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=STOP_S)
