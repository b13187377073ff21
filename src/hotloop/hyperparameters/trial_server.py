"""A process that imports torch and hotloop once, and forks a new process for each trial.

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
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from hotloop.core.files.source_files import installed_versions
from hotloop.core.processes import end_with_parent
from hotloop.errors import HotloopError, TaskError, describe_error
from hotloop.hyperparameters.trial_processes import PREPARE

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
        _send(file, _result(job))
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


def _send(file: Any, result: Any) -> None:
    pickle.dump(result, file)
    file.flush()


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
    from hotloop.hyperparameters.trial_server import serve as run  # the module's one copy, which pickle finds by name

    run(int(sys.argv[1]))
