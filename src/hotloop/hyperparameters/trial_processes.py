"""Processes of trials: a server imports torch and hotloop once, and forks a new process for each job.

So each trial starts in the same state whatever ran before, and running out of memory ends one trial alone. The server
computes nothing itself: a process that has run an autograd pass can't fork a process that runs one.

The first job loads the Task. Meanwhile the server imports what later jobs need, and then the installed packages and the
built-in data that the Task has loaded, so that all jobs share them.

For each job, the study sends one end of a socket. The forked process writes its process id, reads the job, and writes the
result; an end without a result means that the process was killed.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

from hotloop.core.files.source_files import file_of_reference, installed_versions, split_reference
from hotloop.core.processes import end_with_parent
from hotloop.errors import HotloopError, StudyError, TaskError, describe_error, type_name

_STARTS = 3
"""Starts of the server before an error."""

_END_S = 10.0
"""Seconds for the server to end its jobs, before SIGKILL."""

JOB, PREPARE = b"j", b"p"
"""Messages to the server: fork a process for a job; import and read what all jobs need."""

STOP_S = 60.0
"""Seconds for a trial to save after SIGTERM, before SIGKILL."""


@dataclass(frozen=True)
class TaskSource:
    """Where a study's Tasks come from: a file, or a function of Python.

    Attributes:
        make_task: the function, by cloudpickle.
    """

    reference: str
    make_task: bytes | None = None

    @classmethod
    def from_value(cls, value: Any) -> TaskSource:
        """Returns the source of a function that returns a Task, or of a reference such as `file.py`.

        Raises:
            StudyError: neither of them, or a function that can't be sent to other processes.
        """
        if isinstance(value, str | Path):
            file_of_reference(split_reference(str(value))[0])
            return cls(str(value))
        if not callable(value):
            raise StudyError(
                f"study got {type_name(value)}", expected="a function that returns a hotloop.Task, or a file"
            )
        import cloudpickle

        try:
            return cls(getattr(value, "__name__", "make_task"), cloudpickle.dumps(value))
        except Exception as error:
            raise StudyError(
                f"make_task can't be sent to the processes of trials: {type(error).__name__}: {error}",
                expected="a function whose variables can be pickled",
                fix="create such objects inside the function",
            ) from error


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
                [sys.executable, "-m", "hotloop.hyperparameters.trial_processes", str(theirs.fileno())],
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


# --- the server

MODULES_OF_TRIALS = ("torch._dynamo",)
"""What training imports late: torch imports its compiler for the first optimizer, which takes seconds."""


def serve(number: int) -> None:
    """Forks a process for each job until the other end of the socket `number` is closed; then ends all processes."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    from hotloop.hyperparameters.trial import study_versions  # slow, so once here

    _freeze_objects()
    children: set[int] = set()
    with socket.socket(fileno=number) as connection:
        while True:
            message, files, _, _ = socket.recv_fds(connection, 1, 1)
            if not message:
                break
            if message == PREPARE:
                _prepare(files[0])
                continue
            children -= {child for child in children if _has_ended(child)}
            server = os.getpid()
            if (child := os.fork()) == 0:
                connection.close()
                _run_job(files[0], server)
            children.add(child)
            os.close(files[0])
            _import_modules(MODULES_OF_TRIALS)
            study_versions(), installed_versions(["torch"])  # reading them takes 50 ms, and they are cached
            _freeze_objects()
    for child in children:
        if not _has_ended(child):
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    os._exit(0)  # Python's own exit takes a moment


def _freeze_objects() -> None:
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages


def _prepare(number: int) -> None:
    """Imports packages of the Task, and reads its built-in data.

    If the packages start threads, which a forked process would lack, this server ends; the next one does without.
    """
    from hotloop.data import builtin

    with socket.socket(fileno=number) as connection, connection.makefile("rb") as file:
        sys.path[:], names, reads = pickle.load(file)
    _import_modules(names)
    with suppress(HotloopError):  # the jobs report it
        builtin.preload(reads)
    _freeze_objects()
    if thread_count() > 1:
        sys.exit("a package of the Task starts threads")


def _import_modules(names: Iterable[str]) -> None:
    for name in names:
        if name not in sys.modules:
            with suppress(Exception, SystemExit):  # a job that needs the module reports why it can't be imported
                import_module(name)


def thread_count() -> int:
    """Returns the threads of this process; 1 where the system doesn't say."""
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def _has_ended(child: int) -> bool:
    return os.waitpid(child, os.WNOHANG)[0] != 0


def _run_job(number: int, server: int) -> None:
    """Runs one job in this forked process, and exits."""
    os.setsid()
    end_with_parent(server, signal.SIGKILL)
    with socket.socket(fileno=number) as connection, connection.makefile("rwb") as file:
        pickle.dump(os.getpid(), file)
        file.flush()
        job: dict[str, Any] = pickle.load(file)
        _redirect_output(job.pop("log"))
        seed_generators()
        sys.path[:] = job.pop("path")
        pickle.dump(_result(job), file)
        file.flush()
    sys.exit(0)


def _result(job: dict[str, Any]) -> Any:
    """Returns the job's result, or a TaskError for an error that the job doesn't handle."""
    module, _, name = job.pop("work").partition(":")
    try:
        return getattr(import_module(module), name)(**job)
    except SystemExit as error:
        return TaskError(f"the Task called exit({error.code!r})", expected="a Task that trains to its end")
    except Exception as error:
        traceback.print_exc()
        return error if isinstance(error, HotloopError) else TaskError(describe_error(error))


def _redirect_output(log: str) -> None:
    """Appends what the Task prints to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def seed_generators() -> None:
    """Seeds what a Task's file may read without a seed of its own, so that each trial has the same data."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


if __name__ == "__main__":
    from hotloop.hyperparameters.trial_processes import (
        serve as run,
    )  # the module's one copy, which pickle finds by name

    run(int(sys.argv[1]))
