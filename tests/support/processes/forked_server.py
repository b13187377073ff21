"""Real `hotloop` processes that need not import torch, which takes seconds: forks of one process that has.

Each has its own pid, session, streams, folder, environment and random numbers, is signalled and killed as any other, and
ends as any other does. All forks share the seed of Python's hashes, and none shows what an import does: where trainings
are compared a fresh process takes part, and what is said before torch is imported is tried with fresh ones alone.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

NUMBER = struct.Struct("i")
File = int | IO[Any]


class Fork:
    """One process; of `subprocess.Popen`'s ways, those that tests need."""

    def __init__(self, answers: socket.socket, stdout: File, stderr: File) -> None:
        self._answers, self._streams = answers, (stdout, stderr)
        self.returncode: int | None = None
        self.pid = self._answer()

    def _answer(self) -> int:
        (number,) = NUMBER.unpack(self._answers.recv(NUMBER.size))
        return int(number)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("hotloop", timeout or 0)
            self.returncode = self._answer()
            self._answers.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it wrote to its two streams, once it has ended; nothing of a stream that is the test's own."""
        self.wait(timeout)
        return _content(self._streams[0]), _content(self._streams[1])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()  # which goes when nothing refers to it


def _content(stream: File) -> str:
    if isinstance(stream, int) or "+" not in stream.mode:
        return ""
    stream.seek(0)
    return str(stream.read(), "utf-8")


Process = subprocess.Popen[str] | Fork


class Server:
    """Starts processes: forks of one that it keeps, or fresh ones where it may not fork."""

    def __init__(self, *, forks: bool = sys.platform == "linux", requests: socket.socket | None = None) -> None:
        """`requests` is the connection of another Server, which a program inherited."""
        self.forks = forks
        self._requests = requests

    @property
    def requests(self) -> socket.socket:
        """The connection to the process that forks."""
        self._requests = self._requests or _serve_elsewhere()
        return self._requests

    def start(
        self,
        *args: str | Path,
        fresh: bool = False,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: File = subprocess.DEVNULL,
        stdout: File = subprocess.PIPE,
        stderr: File = subprocess.PIPE,
        file_bytes: int | None = None,
        script: bool = False,
        bound: bool = False,
    ) -> Process:
        """Starts `hotloop ARGS` in a session of its own.

        Args:
            fresh: no fork.
            script: the first of `args` is a Python file to run in its place.
            bound: a fork is killed when this process ends.
            stderr: may be `subprocess.STDOUT`.
            file_bytes: the limit on the size of the files that it writes.
        """
        if fresh or not self.forks:
            return subprocess.Popen(
                [sys.executable, *([] if script else ["-m", "hotloop"]), *map(str, args)],
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                encoding="utf-8",
                start_new_session=True,
                preexec_fn=lambda: _prepare(file_bytes),
            )
        out, err = (_file() if given == subprocess.PIPE else given for given in (stdout, stderr))
        request = {
            "args": [str(arg) for arg in args],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "file_bytes": file_bytes,
            "script": script,
            "bound": bound,
        }
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull) as nothing:
            files = [nothing if stdin == subprocess.DEVNULL else stdin, out, out if err == subprocess.STDOUT else err]
            numbers = [file if isinstance(file, int) else file.fileno() for file in (theirs, *files)]
            socket.send_fds(self.requests, [json.dumps(request).encode()], numbers)
        return Fork(ours, out, err)

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()


def _prepare(file_bytes: int | None) -> None:
    # A shell that starts the tests in the background has Ctrl-C ignored by all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def _serve_elsewhere() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        subprocess.Popen([sys.executable, __file__, str(number)], pass_fds=[number], start_new_session=True)
    return ours


def serve(requests: socket.socket) -> None:
    """Forks for each request, until the other side is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none is left as a zombie
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            attend(json.loads(message), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def attend(request: dict[str, Any], answers: int, *streams: int) -> None:
    """Forks the process itself, and tells its pid and how it ended."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        become(request, *streams)
        return
    os.write(answers, NUMBER.pack(pid))
    for stream in streams:
        os.close(stream)
    if request["bound"] and select.select([answers, os.pidfd_open(pid)], [], [])[0][0] == answers:
        os.kill(pid, signal.SIGKILL)  # the other side is closed: nothing else arrives there
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # nobody may wait for it any more
        os.write(answers, NUMBER.pack(code))
    os._exit(0)


def become(request: dict[str, Any], *streams: int) -> None:
    """What `python -m hotloop ARGS`, or `python ARGS`, does, in this process."""
    import numpy as np

    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _prepare(request["file_bytes"])
    random.seed()
    np.random.seed()
    if request["script"]:
        run_script(request["args"])
        return
    sys.path[0] = request["cwd"]
    sys.argv[1:] = request["args"]
    runpy.run_module("hotloop", run_name="__main__", alter_sys=True)


def run_script(args: list[str]) -> None:
    """A script, watched where `hotloop profile` starts it; torch is there already, so its import begins nothing."""
    import torch

    from hotloop.profiler.script_child import start_session

    sys.path[0], sys.argv[:] = str(Path(args[0]).parent), args
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if settings := os.environ.pop("HOTLOOP_SCRIPT", None):
        start_session(json.loads(settings))
    runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    from plotly.subplots import make_subplots

    # What torch's optimizers import, too; but not hotloop.cli, which looks at the streams that it has.
    for name in ("torch._dynamo", "torch.utils.tensorboard", "hotloop.api"):
        with suppress(ImportError):
            import_module(name)
    make_subplots()  # reads what all figures are checked against
    gc.freeze()  # no fork looks through what it shares with the others, which would copy it
    serve(socket.socket(fileno=int(sys.argv[1])))
