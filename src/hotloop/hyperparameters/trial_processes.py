"""The study's side of the trial server: starts jobs, waits for results, and ends processes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from hotloop.errors import StudyError

_STARTS = 3
"""Starts of the server before an error."""

_END_S = 10.0
"""Seconds for the server to end its jobs, before SIGKILL."""

JOB, PREPARE = b"j", b"p"
"""Messages to the server: fork a process for a job; import and read what all jobs need."""

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

    The server starts at once: it imports torch while this process imports other libraries.

    Args:
        log: a folder for what the jobs print; may be set later, before the first job.
        folder: the current folder of the processes.
    """

    def __init__(self, log: Path = Path(), folder: Path = Path()) -> None:
        self.log, self._folder = log, folder
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._output: IO[bytes] | None = None
        self._has_job = False

    def __enter__(self) -> TrialProcesses:
        self._running_server()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_server()

    def start(self, work: str, log: str, **arguments: Any) -> Job:
        """Starts a function, `work` as `module:name`, in a new process."""
        self.log.mkdir(parents=True, exist_ok=True)
        job = pickle.dumps({"work": work, "log": str((self.log / log).absolute()), "path": sys.path, **arguments})
        reason = ""
        for _ in range(_STARTS):
            try:
                return self._start(job)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                reason = self._last_line()
                self._end_server()
        raise StudyError(f"the process that starts trials ended at its start{f': {reason}' if reason else ''}")

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

    def prepare(self, modules: list[str], reads: list[Any]) -> None:
        """Makes the server import modules and read built-in data sets, as each job would.

        Args:
            reads: of the type `hotloop.data.builtin.BuiltinRead`.
        """
        with suppress(ConnectionError):  # a server that has ended is replaced at the next job
            connection, file = self._send(PREPARE)
            with connection, file:
                pickle.dump((sys.path, modules, reads), file)

    def _start(self, job: bytes) -> Job:
        connection, file = self._send(JOB)
        pid = pickle.load(file)
        self._has_job = True
        file.write(job)
        file.flush()
        return Job(connection, pid, file)

    def _send(self, message: bytes) -> tuple[socket.socket, Any]:
        """Sends one end of a new socket to the server; returns the other end, and the same as a file."""
        server = self._running_server()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(server, [message], [theirs.fileno()])
        return ours, ours.makefile("rwb")

    def _running_server(self) -> socket.socket:
        if self._server is not None and self._server.poll() is None and self._connection is not None:
            return self._connection
        self._end_server()
        self._connection, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "hotloop.hyperparameters.trial_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
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
                self._server.wait(_END_S if self._has_job else 0)  # without a job it may still import
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server, self._has_job = None, False
        if self._output is not None:
            self._output.close()
            self._output = None

    def _last_line(self) -> str:
        """Returns the last line that the server has printed."""
        if self._output is None:
            return ""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else ""
