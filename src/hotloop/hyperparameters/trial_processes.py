"""The study's side of the trial server: starts jobs, waits for results, and ends processes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hotloop.errors import StudyError

_STARTS = 3
"""Starts of the server before an error."""

STOP_S = 60.0
"""Seconds for a trial to save after SIGTERM, before SIGKILL."""


class Workers(Protocol):
    """Runs jobs; each job has a method `result`, whose value is None if the job's process was killed."""

    def start(self, work: str, log: str, **arguments: Any) -> Any: ...

    def next_finished(self, jobs: Iterable[Any]) -> list[Any]: ...

    def stop(self, jobs: Iterable[Any]) -> None: ...


class Job:
    """A job in a forked process."""

    def __init__(self, connection: socket.socket, pid: int, file: Any) -> None:
        self.connection, self.pid, self._file = connection, pid, file

    def fileno(self) -> int:
        return self.connection.fileno()

    def result(self) -> Any:
        """Returns the result, or None if the process was killed."""
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError, ConnectionError):
            return None
        finally:
            self._file.close()
            self.connection.close()

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class TrialProcesses:
    """Starts jobs in processes of one thread; a context that ends all of them.

    Args:
        log: a folder for what the processes print.
        folder: the current folder of the processes.
    """

    def __init__(self, log: Path, folder: Path = Path()) -> None:
        self.log, self._folder = log, folder
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def __enter__(self) -> TrialProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_server()

    def start(self, work: str, log: str, **arguments: Any) -> Job:
        """Starts a function, `work` as `module:name`, in a new process."""
        job = pickle.dumps({"work": work, "log": str((self.log / log).absolute()), "path": sys.path, **arguments})
        for _ in range(_STARTS):
            try:
                return self._start(job)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                self._end_server()
        raise StudyError(
            "the process that starts trials ended at its start", fix=f"read {self.log / 'server.txt'} for the reason"
        )

    def run(self, work: str, log: str, *, attempts: int = 1, **arguments: Any) -> Any:
        """Runs a job to its end, and returns its result, or None if its process was killed at each attempt."""
        result = None
        while result is None and attempts > 0:
            job, attempts = self.start(work, log, **arguments), attempts - 1
            try:
                result = job.result()
            except BaseException:
                job.send_signal(signal.SIGKILL)
                raise
        return result

    def next_finished(self, jobs: Iterable[Job], timeout_s: float | None = None) -> list[Job]:
        """Waits until a job has ended, and returns those that have."""
        return select.select(list(jobs), [], [], timeout_s)[0]

    def stop(self, jobs: Iterable[Job]) -> None:
        """Makes trials save and end; a trial that doesn't is killed."""
        waiting = list(jobs)
        for job in waiting:
            job.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        try:
            while waiting and (left := until - time.monotonic()) > 0:
                for job in self.next_finished(waiting, left):
                    job.result()
                    waiting.remove(job)
        finally:
            for job in waiting:
                job.send_signal(signal.SIGKILL)

    def _start(self, job: bytes) -> Job:
        server = self._running_server()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(server, [b"j"], [theirs.fileno()])
        file = ours.makefile("rwb")
        pid = pickle.load(file)
        file.write(job)
        file.flush()
        return Job(ours, pid, file)

    def _running_server(self) -> socket.socket:
        if self._server is not None and self._server.poll() is None and self._connection is not None:
            return self._connection
        self._end_server()
        self._connection, theirs = socket.socketpair()
        self.log.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs, (self.log / "server.txt").open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "hotloop.hyperparameters.trial_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the study, which tells the trials to save
            )
        return self._connection

    def _end_server(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
