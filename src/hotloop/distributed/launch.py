"""Starts ranks on this machine by torch's elastic agent, and starts them again when one was killed."""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hotloop import errors
from hotloop.core.hardware.devices import device_names, resolve_device
from hotloop.core.patches import patch_attribute
from hotloop.core.processes import HANGUP, LAUNCHER, STOP_SIGNALS, signal_handlers
from hotloop.core.reporter import Say, silence_loggers
from hotloop.distributed.fork_safety import FORK_BYTES, OWN_BYTES, check_process_memory, end_openmp_threads
from hotloop.distributed.join import LAUNCH_ID_PREFIX, run_in
from hotloop.distributed.watchdog import LaunchWatch, find_place, last_place, read_frames
from hotloop.errors import HotloopError, PlanError, RankLostError, TrainingError
from hotloop.plan import Plan

RESTARTS = 3

STOP_CODES = {128 + number: number for number in STOP_SIGNALS}
"""Exit codes of a training that saved and stopped."""

LOOPBACK = "127.0.0.1"


def local_rank_count(plan: Plan) -> int:
    """Returns the number of ranks of the plan on this machine: the plan's own, else one for each GPU.

    Raises:
        PlanError: the ranks compute on the CPU, and the plan gives no number.
    """
    if plan.ranks is not None:
        return plan.ranks
    kind = resolve_device(plan).device.partition(":")[0]
    devices = [name for name in device_names() if name.partition(":")[0] == kind and kind != "cpu"]
    if not devices:
        cores = psutil.cpu_count(logical=False) or 1
        raise PlanError(
            f"parallel={plan.parallel} on the CPU without a number of ranks",
            expected=f"how many, at most the cores, of which there are {cores} here",
            fix=f"use --ranks {max(2, cores)}, or ranks={max(2, cores)} in the plan",
        )
    return len(devices)


def own_command() -> list[str]:
    """Returns the running command line of hotloop, for a rank."""
    imports_from_cwd = sys.path[0] in ("", os.getcwd())  # true of `python -m hotloop`, false of `hotloop`
    return [sys.executable, *([] if imports_from_cwd else ["-P"]), "-m", "hotloop", *sys.argv[1:]]


def launch(ranks: int, entry: Callable[..., Any] | list[str], say: Say, *, restarts: int = RESTARTS) -> tuple[str, int]:
    """Runs `entry` as ranks until their end; starts all again from the last checkpoint if a rank is killed.

    Args:
        entry: a command, or a function without arguments that forks of this process call.
        say: reports killed ranks, and a rank 0 without heartbeat.
        restarts: the largest number of new starts.

    Returns:
        The run (empty if none began), and the exit code: 0, or that of a training that saved and stopped on a signal.

    Raises:
        PlanError: the machine lacks memory for the ranks.
        HotloopError: the error of the rank that failed first.
        TrainingError: ranks were killed, and no restart is left.
    """
    check_process_memory(ranks, OWN_BYTES if isinstance(entry, list) else FORK_BYTES)
    signals = SignalForwarder(say)
    with (
        signals.listen(),
        open_store() as store,
        silence_loggers("torch.distributed.elastic", "torch.multiprocessing.spawn"),
        tempfile.TemporaryDirectory(prefix=LAUNCH_ID_PREFIX) as logs,
    ):

        def start(name: str) -> None:
            _start_ranks(_config(name, ranks, store.port, logs), entry, signals)

        return launch_until_done(
            start, ranks, store, logs, say, restarts=restarts, heard=lambda: signals.heard, kill=signals.kill
        )


def launch_until_done(
    start: Callable[[str], None],
    ranks: int,
    store: dist.TCPStore,
    logs: str,
    say: Say,
    *,
    restarts: int = RESTARTS,
    heard: Callable[[], signal.Signals | None] = lambda: None,
    kill: Callable[[], None] = lambda: None,
) -> tuple[str, int]:
    """Starts ranks, and starts them again if a rank is killed; see `launch`.

    Args:
        start: runs the ranks of the given launch name to their end; raises ChildFailedError of torch's agent.
        store: the store of the ranks' process group.
        logs: the log folder, in which the stderr of rank r is `*/attempt_*/r/stderr.log`.
        heard: returns the last signal that was passed on to the ranks, or None.
        kill: kills the ranks.
    """
    launched = LAUNCH_ID_PREFIX + uuid.uuid4().hex[:8]
    for attempt in range(restarts + 1):
        name = f"{launched}-{attempt}"
        try:
            watched = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
            with LaunchWatch(watched, f"{name}/0", say, kill).watch():
                start(name)
            return run_in(store) or "", 0
        except ChildFailedError as failed:
            cause = _first_failure(failed.failures)
            if (code := cause[1].exitcode) in STOP_CODES:
                if words := _recorded_error(cause[1])[1]:  # recorded by a watchdog
                    say(words)
                elif run_in(store) is None and code != 128 + signal.SIGINT:  # ranks report Ctrl-C themselves
                    say(f"stopped ({STOP_CODES[code].name})")
                return run_in(store) or "", code
            killed = _describe_kill(*cause, logs)
            if cause[1].signal_name() in _OWN_EXIT_CODES and (
                place := _crash_place(store, f"{name}/0", cause[0], logs)
            ):
                killed += f", last seen {place}"
            if (number := heard()) is not None:  # the ranks ended before training, or were killed after the signal
                say(f"stopped ({number.name})")
                return run_in(store) or "", 128 + number
            if attempt == restarts:
                again = f", after {restarts} new starts" if restarts else ""
                raise TrainingError(f"{killed}{again}", fix="find what kills it") from None
        say(f"{killed}: all {ranks} start again from the last checkpoint ({attempt + 1} of {restarts})")
    raise AssertionError("the last attempt returns or raises")


def _start_ranks(config: LaunchConfig, entry: Callable[..., Any] | list[str], signals: SignalForwarder) -> None:
    if isinstance(entry, list):
        os.environ[LAUNCHER] = str(os.getpid())
        elastic_launch(config, entry[0])(*entry[1:])
        return

    launcher = os.getpid()

    def call() -> None:
        if signals.active:
            os.setsid()  # the terminal sends Ctrl-C to the parent alone, which passes each Ctrl-C on once
        gc.freeze()
        gc.enable()
        # torch's agent requests SIGINT for the end of each parent thread, and a second SIGINT means to stop unsaved.
        multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # in place of the parent's handler
            for number in (signal.SIGTERM, *HANGUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            if signals.heard is not None:
                os._exit(128 + signals.heard)  # at once, before further signals
            entry()
            if os.getppid() != launcher:  # the launcher was killed, and torch would wait for its reply
                raise SystemExit(128 + signal.SIGTERM)
        except KeyboardInterrupt:  # torch would count this as success and wait for a result
            raise SystemExit(128 + signal.SIGINT) from None

    end_openmp_threads()
    # A fork must not collect an inherited store: its destructor waits for a thread that only the parent has.
    gc.collect()
    gc.disable()
    try:
        with _release_ranks(config.nproc_per_node):
            elastic_launch(config, call)()
    finally:
        gc.enable()


class _ReleaseEvent:
    """An event for which ranks wait after their last line, until the launcher has their results.

    torch 2.13 calls `multiprocessing.Event.set` here, which waits without end for a process that was killed in `wait`.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        os.close(self._write)  # so that the read returns if the launcher has ended
        os.read(self._read, 1)

    def set(self) -> None:
        os.write(self._write, bytes(self._ranks))

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def _release_ranks(ranks: int) -> Iterator[None]:
    """Makes torch's agent use `_ReleaseEvent` within the context."""
    with closing(_ReleaseEvent(ranks)) as release:

        def start(original: Callable[[MultiprocessContext], None]) -> Callable[[MultiprocessContext], None]:
            def replacement(context: MultiprocessContext) -> None:
                # torch declares an Event, and calls only `wait` and `set`.
                context._worker_finished_event = release  # type: ignore[assignment]
                original(context)

            return replacement

        with patch_attribute(MultiprocessContext, "_start", start):
            yield


def _config(name: str, ranks: int, port: int, logs: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=name,
        rdzv_backend="static",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,  # an error of the Task would repeat; `launch` restarts killed ranks
        start_method="fork",
        signals_to_handle="SIGQUIT",  # `SignalForwarder` passes the others on to the ranks
        logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
    )


@contextmanager
def open_store(host: str = LOOPBACK) -> Iterator[dist.TCPStore]:
    """Opens the store in which the ranks and their launcher find each other, on this address alone."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        yield dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )


def _first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Returns the rank that failed by itself; other ranks fail because they lost that rank."""

    def follows(failure: ProcessFailure) -> bool:
        return _recorded_error(failure)[0] == RankLostError.__name__ or failure.exitcode == -signal.SIGTERM

    return min(failures.items(), key=lambda item: (follows(item[1]), item[1].timestamp, item[0]))


def _recorded_error(failure: ProcessFailure) -> tuple[str, str]:
    """Returns class name and text of the error that the rank recorded; empty without a record."""
    message = failure.error_file_data.get("message") if failure.error_file_data else None
    text = message.get("message", "") if isinstance(message, dict) else ""
    name, _, words = text.partition(": ")
    return (name, words) if name else ("", "")


_OWN_EXIT_CODES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that a process sends to itself, mostly after a message on stderr."""


def _describe_kill(rank: int, failure: ProcessFailure, logs: str) -> str:
    """Returns the message about a rank that a signal killed; raises the HotloopError of other failed ranks."""
    name, words = _recorded_error(failure)
    if name == RankLostError.__name__ or failure.exitcode < 0:
        sort = failure.signal_name() if failure.exitcode < 0 else "lost its connection to the others"
        last = _last_line(logs, rank) if sort in _OWN_EXIT_CODES else ""
        sort += f", after it wrote {last!r}" if last else ""
        return f"rank {rank} was killed ({sort})" if failure.exitcode < 0 else f"rank {rank} {sort}"
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HotloopError):
        raise kind(words)
    what = f"{name}: {words}" if name else _last_line(logs, rank)
    raise TrainingError(f"rank {rank} ended with exit code {failure.exitcode}: {what or 'without a message'}")


def _crash_place(store: dist.TCPStore, launch: str, rank: int, logs: str) -> str:
    """Returns where a rank aborted itself, else the place that the rank published last; empty without both."""
    frames = read_frames(Path(logs), rank)
    if frames and faulthandler.is_enabled():
        sys.stderr.write(frames)  # the rank's own faulthandler wrote to the file
    return find_place(frames) or str(last_place(store, launch, rank) or "")


def _last_line(logs: str, rank: int) -> str:
    """Returns the last line on a rank's stderr, without the frames that Python's faulthandler writes."""
    files = sorted(Path(logs).glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    text = files[-1].read_text(errors="replace") if files else ""
    lines = text.partition("Fatal Python error")[0].split("\n")
    return next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")


_KILL_AFTER_S = 5.0
"""Time for the ranks to end after a second Ctrl-C; a stopped rank, or one that waits in C++, doesn't end by itself."""

_POLL_S = 0.2
"""Time between two searches for newly started ranks, after a signal."""


class SignalForwarder:
    """Passes Ctrl-C and SIGTERM on to the ranks; torch's agent itself would kill them.

    Args:
        say: reports that ranks are killed.

    Attributes:
        heard: the last received signal; a fork that begins later inherits the value.
        active: whether this object receives signals: only the main thread may set handlers.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.heard: signal.Signals | None = None
        self.active = False
        self._say = say
        self._owner = os.getpid()
        self._others = {child.pid for child in psutil.Process().children()}
        self._came: queue.SimpleQueue[signal.Signals | None] = (
            queue.SimpleQueue()
        )  # a signal handler may call its `put`

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Passes signals on within the context, in a thread: the main thread may wait in torch's agent."""
        thread = threading.Thread(target=self._pass_on, name="hotloop-forwarding", daemon=True)
        thread.start()
        try:
            with signal_handlers(self._on_signal, *STOP_SIGNALS) as self.active:
                yield
        finally:
            self._came.put(None)
            thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.heard is not None and number == signal.SIGINT
        self.heard = signal.SIGINT if again else signal.Signals(number)
        if os.getpid() == self._owner:
            self._came.put(self.heard)

    def _pass_on(self) -> None:
        came: list[signal.Signals] = []
        sent: dict[int, int] = {}  # number of signals sent to each process
        kill_at: float | None = None
        while True:
            with suppress(queue.Empty):
                if (number := self._came.get(timeout=_POLL_S if came else None)) is None:
                    return
                if came and number == signal.SIGINT and kill_at is None:
                    kill_at = time.monotonic() + _KILL_AFTER_S
                came.append(number)
            for rank in self._ranks():
                for number in came[sent.get(rank.pid, 0) :]:
                    _send_signal(rank, number)
                sent[rank.pid] = len(came)
            if kill_at is not None and time.monotonic() > kill_at:
                self._kill()
                kill_at = None

    def _kill(self) -> None:
        if self._ranks():
            self._say(f"the ranks haven't ended {_KILL_AFTER_S:.0f}s after a second Ctrl-C: killing them")
        self.kill()

    def kill(self) -> None:
        for rank in self._ranks():
            _send_signal(rank, signal.SIGKILL)

    def _ranks(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in self._others]


def _send_signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
