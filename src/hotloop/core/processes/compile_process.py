"""A child process that compiles and measures code; the parent can stop the process at any time."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from hotloop.core.processes.parent_death import end_with_parent
from hotloop.errors import describe_error

Work = Callable[[], dict[str, Any]]


class CompileProcess:
    """A fork of this process that calls `work` with copies of the parent's objects.

    Compilers that the child starts belong to its process group and end with the child. A fork can't use its parent's
    CUDA context, so `work` must use the CPU alone.

    Args:
        work: returns values that JSON can represent.

    Attributes:
        pid: the child's process id.
    """

    _text = b""

    def __init__(self, work: Work) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run_child(work, writing, parent)
        os.close(writing)
        with suppress(OSError):
            os.setpgid(self.pid, self.pid)  # the child calls setpgid too: either process may be first
        self._reading, self._ended = reading, False

    def __enter__(self) -> CompileProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def result(self, seconds: float) -> dict[str, Any]:
        """Returns the result of `work`; `{"failure": why}` after an error, a death or more than `seconds`."""
        found = self._read(time.monotonic() + seconds)
        return found or {"failure": f"compiling and measuring did not finish within {seconds:.0f} s"}

    def poll(self) -> dict[str, Any] | None:
        """Returns the result of `work`, or `{"failure": why}`; None while the child works."""
        return self._read(None)

    def _read(self, until: float | None) -> dict[str, Any] | None:
        """Reads until the child closes its pipe; None if the pipe has no more data at the time `until`, or now."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._reading, selectors.EVENT_READ)
            while waiting.select(0 if until is None else max(0.0, until - time.monotonic())):
                if not (part := os.read(self._reading, 1 << 16)):
                    return _parse_result(self._text)
                self._text += part
        return None

    @property
    def is_ready(self) -> bool:
        """Whether the result is there, or the child has ended."""
        return bool(select.select([self._reading], [], [], 0)[0])

    def pause(self) -> None:
        """Stops the child and its compilers until `proceed`."""
        self._signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(OSError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Kills the child and its compilers if they still run."""
        if self._ended:
            return
        self._ended = True
        os.close(self._reading)
        self._signal(signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _parse_result(text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:  # the child died before it wrote its whole result
        return {"failure": "the compiling process died"}


def _run_child(work: Work, writing: int, parent: int) -> NoReturn:
    """Detaches the child from the parent's signals and streams, calls `work` and exits."""
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        end_with_parent(parent, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        _allow_threads()
        # OpenMP caches a pool per thread, and a fork copies no pool threads: a new thread gets a new pool.
        thread = threading.Thread(target=_report_result, args=(work, writing))
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _allow_threads() -> None:
    """Allows new executors for torch's compiler: CPython (3.9 to 3.13) refuses them if the parent is exiting."""
    for module, name in (("threading", "_SHUTTING_DOWN"), ("concurrent.futures.thread", "_shutdown")):
        if getattr(sys.modules.get(module), name, False):
            setattr(sys.modules[module], name, False)


def _report_result(work: Work, writing: int) -> None:
    try:
        result = work()
    except BaseException as error:
        result = {"failure": describe_error(error)}
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(result).encode())
