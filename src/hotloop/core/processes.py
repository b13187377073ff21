"""Signals, deadlines, and child processes that end with their parent."""

from __future__ import annotations

import json
import math
import os
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn

from hotloop.errors import HotloopError, TimeOverError, describe_error

HANGUP: tuple[signal.Signals, ...] = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
"""The signal of a closed terminal (not on Windows)."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *HANGUP)

REPEAT_SIGNAL_S = 1.0
"""Signals within this time after an interruption count as the same interruption: a held key repeats Ctrl-C."""


class StopRequested(Exception):
    """Work was stopped for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def signal_handlers(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[bool]:
    """Sets `handler` as the handler of signals within the context, then restores the previous handlers.

    Yields whether the handler is set: only the main thread may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    ignored = [number for number in HANGUP if signal.getsignal(number) is signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield True
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


REASONS = (None, "stop-after", "SIGHUP", "SIGTERM", "SIGINT")
"""Reasons to stop, by increasing priority; ranks that stop together agree on the last reason of all."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP (`number`) arrived during work without a state to save."""

    def __init__(self, *arguments: object, number: int = signal.SIGTERM) -> None:
        super().__init__(*arguments)
        self.number = number


def end_reason(at: str, error: HotloopError | KeyboardInterrupt) -> dict[str, str]:
    """Returns the fields `ended_by` and `ended` of a record of work that ended early; `at` names the current work."""
    if isinstance(error, HotloopError):
        return {"ended_by": "failure", "ended": f"{at}: {error}"}
    by = signal.Signals(error.number).name if isinstance(error, Terminated) else "SIGINT"
    return {"ended_by": by, "ended": f"stopped by {by} at {at}"}


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise Terminated, and Ctrl-C KeyboardInterrupt, once per `REPEAT_SIGNAL_S`."""
    owner, raised_at = os.getpid(), -math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if os.getpid() != owner:  # a forked worker
            os._exit(128 + number)
        before, raised_at = raised_at, time.monotonic()
        if raised_at - before < REPEAT_SIGNAL_S:
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number=number)

    with signal_handlers(on_signal, *STOP_SIGNALS):
        yield


class StopSignals:
    """Decides whether training must stop.

    Attributes:
        stop_after_s: seconds from construction until the stop; None for never.
    """

    def __init__(self, stop_after_s: float | None = None) -> None:
        self.stop_after_s = stop_after_s
        self._start = time.monotonic()
        self._signal: signal.Signals | None = None
        self._raised_at = -math.inf

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Records SIGINT, SIGTERM and SIGHUP within the context; a second SIGINT raises KeyboardInterrupt."""
        with signal_handlers(self._on_signal, *STOP_SIGNALS):
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            before, self._raised_at = self._raised_at, time.monotonic()
            if self._raised_at - before >= REPEAT_SIGNAL_S:
                raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def reason(self, reserve_s: float = 0.0) -> str | None:
        """Returns `SIGINT`, `SIGTERM`, `SIGHUP`, `stop-after`, or None; `reserve_s` is the expected time of saving."""
        if self._signal is not None:
            return self._signal.name
        if self.stop_after_s is not None and time.monotonic() - self._start + reserve_s >= self.stop_after_s:
            return "stop-after"
        return None

    def check(self, reserve_s: float = 0.0, largest: Callable[[list[int]], list[int]] = list) -> None:
        """Raises StopRequested if there is a reason to stop; `largest` computes the maximum over all ranks."""
        (place,) = largest([REASONS.index(self.reason(reserve_s))])
        if reason := REASONS[place]:
            raise StopRequested(reason)


_REPEAT_ALARM_S = 5.0
"""Seconds after which SIGALRM is repeated, in case code swallowed the error."""


class _TimeLimitReached(BaseException):
    """A BaseException, since libraries catch Exception."""


class _Alarm:
    """Handles SIGALRM; `at` is the time of the signal by `time.monotonic()`."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise _TimeLimitReached


@contextmanager
def time_limit(seconds: float, too_long: Callable[[], Exception]) -> Iterator[None]:
    """Ends the work within the context after so many seconds, with the error that `too_long` returns.

    An enclosing `time_limit` that ends earlier takes precedence. Only the main thread can be interrupted. Windows has
    no alarms, and so no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.monotonic()
    alarm, outer = _Alarm(began + seconds), signal.getsignal(signal.SIGALRM)
    if isinstance(outer, _Alarm) and outer.at <= alarm.at:
        yield
        return
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, 0.0)  # another library's timer, restored below
    try:
        with signal_handlers(alarm, signal.SIGALRM), _alarm(seconds):
            yield
    except _TimeLimitReached:
        raise too_long() from None
    finally:
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left_s - (time.monotonic() - began)), again_s)


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_ALARM_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


SEARCH_SHARE = 1 / 3
"""Largest share of the time until a run's stop that a search may use."""

GRACE_S = 2.0
"""Seconds after a deadline for the cleanup of ended work."""

_MIN_S = 1.0
"""Shortest time of one piece of work, in seconds: a limit of milliseconds ends a command within seconds."""


@dataclass
class Deadline:
    """A point in time at which work must end.

    Attributes:
        at: the deadline, in seconds of `time.monotonic()`.
        is_met: whether the deadline skipped or shortened work.
        from_seconds: the origin of the time in messages.
    """

    at: float = math.inf
    is_met: bool = False
    from_seconds: str = "of the third of the time until stop-after that a search may take"

    @classmethod
    def minus(cls, until: float, limit_at: float = math.inf) -> Deadline:
        """Returns the deadline of a search that begins now.

        Args:
            until: the run's stop, in seconds of `time.monotonic()`.
            limit_at: the user's own limit of the search, in seconds of `time.monotonic()`.
        """
        now = time.monotonic()
        own = cls(now + SEARCH_SHARE * (until - now))
        return own if own.at <= limit_at else cls(limit_at, from_seconds="of the time limit")

    @classmethod
    def from_limit(cls, limit_s: float | None, began: float | None = None) -> Deadline:
        """Returns the deadline of a time limit; None is no limit.

        Args:
            began: start of the work, in seconds of `time.monotonic()`; None is now.
        """
        if limit_s is None:
            return cls(from_seconds="of the time limit")
        return cls((time.monotonic() if began is None else began) + limit_s, from_seconds="of the time limit")

    @property
    def left_s(self) -> float:
        return self.at - time.monotonic()

    def has_time_for(self, seconds: float) -> bool:
        """Returns whether so many seconds remain; sets `is_met` if not."""
        allowed = seconds <= self.left_s
        self.is_met |= not allowed
        return allowed

    def fraction(self, share: float) -> Deadline:
        """Returns the deadline of a piece of work that may use a share of the remaining time."""
        if math.isinf(self.at):
            return self
        return Deadline(self.at - (1 - share) * max(0.0, self.left_s), from_seconds=self.from_seconds)

    @contextmanager
    def enforce(self, what: str, *, reserve_s: float = 0.0) -> Iterator[None]:
        """Ends the work within the context when only `reserve_s` seconds remain.

        Args:
            what: the work's name in the message, such as `its proof`.

        Raises:
            TimeOverError: the deadline ended the work.
        """
        if math.isinf(self.at):
            yield
            return

        def timeout_error() -> TimeOverError:
            self.is_met = True
            return TimeOverError(
                f"{what} was ended: {self}", expected="work that fits into the time", fix="give it more time"
            )

        with time_limit(max(_MIN_S, self.left_s - reserve_s), timeout_error):
            yield

    def __str__(self) -> str:
        return f"{max(0.0, self.left_s):.0f} s are left {self.from_seconds}"


LAUNCHER = "HOTLOOP_LAUNCHER"
"""Environment variable with the process id of the launcher of the ranks."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Makes the system send this child a signal when its parent ends; ends the child if the parent is already dead.

    Linux sends the signal when the thread that started the child ends, so this thread must live as long as the child.

    Args:
        parent: the parent's process id.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # only processes that call this function need ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


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
                    try:
                        return dict(json.loads(self._text))
                    except ValueError:  # the child died before it wrote its whole result
                        return {"failure": "the compiling process died"}
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
        # torch's compiler needs new executors, which CPython (3.9 to 3.13) refuses if the parent is exiting.
        for module, name in (("threading", "_SHUTTING_DOWN"), ("concurrent.futures.thread", "_shutdown")):
            if getattr(sys.modules.get(module), name, False):
                setattr(sys.modules[module], name, False)
        # OpenMP caches a pool per thread, and a fork copies no pool threads: a new thread gets a new pool.
        thread = threading.Thread(target=_report_result, args=(work, writing))
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _report_result(work: Work, writing: int) -> None:
    try:
        result = work()
    except BaseException as error:
        result = {"failure": describe_error(error)}
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(result).encode())
