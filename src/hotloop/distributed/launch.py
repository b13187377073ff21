"""Starts ranks on this machine by torch's elastic agent, and starts them again when one was killed."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
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
from hotloop.core.processes.parent_death import LAUNCHER
from hotloop.core.processes.signals import HANGUP, STOP_SIGNALS
from hotloop.core.reporter import silence_loggers
from hotloop.distributed.crash_frames import find_place, read_frames
from hotloop.distributed.fork_safety import FORK_BYTES, OWN_BYTES, check_process_memory, end_openmp_threads
from hotloop.distributed.heartbeat import LaunchWatch
from hotloop.distributed.process_group import LAUNCH_ID_PREFIX, run_in
from hotloop.distributed.signal_forwarding import SignalForwarder
from hotloop.distributed.watchdog import last_place
from hotloop.errors import HotloopError, PlanError, RankLostError, TrainingError
from hotloop.plan import Plan

RESTARTS = 3

STOP_CODES = {128 + number: number for number in STOP_SIGNALS}
"""Exit codes of a training that saved and stopped."""

LOOPBACK = "127.0.0.1"

Report = Callable[[str], None]


def local_rank_count(plan: Plan) -> int:
    """How many ranks the plan is for on this machine: those that it names, else one for each device of its kind.

    Raises:
        PlanError: on a CPU, which is one device for all, it must name them.
    """
    if plan.ranks is not None:
        return plan.ranks
    kind = resolve_device(plan).device.partition(":")[0]
    found = [name for name in device_names() if name.partition(":")[0] == kind and kind != "cpu"]
    if not found:
        cores = psutil.cpu_count(logical=False) or 1
        raise PlanError(
            f"parallel={plan.parallel} on the CPU without a number of ranks",
            expected=f"how many, at most the cores, of which there are {cores} here",
            fix=f"use --ranks {max(2, cores)}, or ranks={max(2, cores)} in the plan",
        )
    return len(found)


def own_command() -> list[str]:
    """This command line of hotloop's, for a rank to run as it was typed."""
    beside = sys.path[0] in ("", os.getcwd())  # `python -m hotloop` looks for modules there, `hotloop` doesn't
    return [sys.executable, *([] if beside else ["-P"]), "-m", "hotloop", *sys.argv[1:]]


def launch(
    ranks: int, entry: Callable[..., Any] | list[str], say: Report, *, restarts: int = RESTARTS
) -> tuple[str, int]:
    """Runs `entry` as so many ranks, to its end; again from the last checkpoint, a few times, if one is killed.

    Args:
        entry: a command; or a function without arguments, called in forks of this process, so that it may be any.
        say: is told which rank was killed, and that the first, which speaks for all, gives no sign of life.
        restarts: how often they start again, at most.

    Returns:
        The run that they trained in (empty if it never began), and the exit code: 0, or that of a training that was
        stopped by a signal and saved.

    Raises:
        PlanError: there is no memory for so many.
        HotloopError: the error of the rank that failed first.
        TrainingError: ranks were killed, again and again if they may start again.
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
    say: Report,
    *,
    restarts: int = RESTARTS,
    heard: Callable[[], signal.Signals | None] = lambda: None,
    kill: Callable[[], None] = lambda: None,
) -> tuple[str, int]:
    """Starts ranks, and again if one is killed; see `launch`.

    Args:
        start: runs them to their end, under the name that it is given; raises ChildFailedError of torch's agent.
        store: through which they find each other.
        logs: a folder where what rank r writes is in `*/attempt_*/r/stderr.log`.
        heard: the last signal that was passed on to the ranks, if any was.
        kill: kills the ranks.
    """
    launched = LAUNCH_ID_PREFIX + uuid.uuid4().hex[:8]
    for attempt in range(restarts + 1):
        name = f"{launched}-{attempt}"
        try:
            with _launch_watch(store, f"{name}/0", say, kill).watch():
                start(name)
            return run_in(store) or "", 0
        except ChildFailedError as failed:
            cause = _first_failure(failed.failures)
            if (code := cause[1].exitcode) in STOP_CODES:
                if words := _recorded_error(cause[1])[1]:  # of a watchdog
                    say(words)
                elif run_in(store) is None and code != 128 + signal.SIGINT:  # of Ctrl-C a rank tells by itself
                    say(f"stopped ({STOP_CODES[code].name})")
                return run_in(store) or "", code
            killed = _describe_kill(*cause, logs)
            if cause[1].signal_name() in _OWN_EXIT_CODES and (
                place := _crash_place(store, f"{name}/0", cause[0], logs)
            ):
                killed += f", last seen {place}"
            if (
                number := heard()
            ) is not None:  # of which they died where they don't train yet, or were killed after it
                say(f"stopped ({number.name})")
                return run_in(store) or "", 128 + number
            if attempt == restarts:
                again = f", after {restarts} new starts" if restarts else ""
                raise TrainingError(f"{killed}{again}", fix="look for what kills it") from None
        say(f"{killed}: all {ranks} start again from the last checkpoint ({attempt + 1} of {restarts})")
    raise AssertionError("the last attempt returns or raises")


def _launch_watch(store: dist.TCPStore, name: str, say: Report, kill: Callable[[], None]) -> LaunchWatch:
    return LaunchWatch(dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False), name, say, kill)


def _start_ranks(config: LaunchConfig, entry: Callable[..., Any] | list[str], signals: SignalForwarder) -> None:
    """Runs the ranks to their end.

    Args:
        signals: whether forks leave the terminal's group, since this process passes on what it hears; and what it heard
            before they began.
    """
    if isinstance(entry, list):
        os.environ[LAUNCHER] = str(os.getpid())
        elastic_launch(config, entry[0])(*entry[1:])
        return

    launcher = os.getpid()

    def call() -> None:
        if signals.active:
            os.setsid()  # a terminal's Ctrl-C goes to the parent alone, which passes it on: a second one has a meaning
        gc.freeze()
        gc.enable()
        # torch has SIGINT tell of the parent's death, once for each thread of it; and a second SIGINT means not to save.
        multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # not the parent's way with them, until it trains
            for number in (signal.SIGTERM, *HANGUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            if signals.heard is not None:
                os._exit(128 + signals.heard)  # at once, since more of them may come
            entry()
            if os.getppid() != launcher:  # which was killed: torch would wait for it to take note of the end
                raise SystemExit(128 + signal.SIGTERM)
        except KeyboardInterrupt:  # torch takes it for a good end, and waits for what it never returned
            raise SystemExit(128 + signal.SIGINT) from None

    end_openmp_threads()
    # A store that a fork inherits must not be collected there: its end waits for a thread that only the parent has.
    gc.collect()
    gc.disable()
    try:
        with _release_ranks(config.nproc_per_node):
            elastic_launch(config, call)()
    finally:
        gc.enable()


class _ReleaseEvent:
    """An event for which ranks wait after their last line, until the launcher has their results.

    `multiprocessing.Event.set`, which torch 2.13 calls here, waits without end for a process that was killed in `wait`.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        os.close(self._write)  # so that the read ends if the launcher has ended
        os.read(self._read, 1)

    def set(self) -> None:
        os.write(self._write, bytes(self._ranks))

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def _release_ranks(ranks: int) -> Iterator[None]:
    """Torch's agent uses `_ReleaseEvent` meanwhile."""
    with closing(_ReleaseEvent(ranks)) as release:

        def start(torchs: Callable[[MultiprocessContext], None]) -> Callable[[MultiprocessContext], None]:
            def started(context: MultiprocessContext) -> None:
                # torch declares an Event, and calls its `wait` and `set` alone.
                context._worker_finished_event = release  # type: ignore[assignment]
                torchs(context)

            return started

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
        max_restarts=0,  # an error of the Task's would come again each time; `launch` starts again what was killed
        start_method="fork",
        signals_to_handle="SIGQUIT",  # the others go to the ranks, which save
        logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
    )


@contextmanager
def open_store(host: str = LOOPBACK) -> Iterator[dist.TCPStore]:
    """Through which ranks and who starts them find each other; it outlives them, and listens at this address alone."""
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
    """The rank that failed by itself, of all that failed; the others only lost it."""

    def follows(failure: ProcessFailure) -> bool:
        return _recorded_error(failure)[0] == RankLostError.__name__ or failure.exitcode == -signal.SIGTERM

    return min(failures.items(), key=lambda item: (follows(item[1]), item[1].timestamp, item[0]))


def _recorded_error(failure: ProcessFailure) -> tuple[str, str]:
    """Class and text of the error that the rank noted; empty if it noted none."""
    message = failure.error_file_data.get("message") if failure.error_file_data else None
    text = message.get("message", "") if isinstance(message, dict) else ""
    name, _, words = text.partition(": ")
    return (name, words) if name else ("", "")


_OWN_EXIT_CODES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""What a process does to itself, mostly with a word of why."""


def _describe_kill(rank: int, failure: ProcessFailure, logs: str) -> str:
    """What to say of a rank that was killed by a signal.

    Raises:
        HotloopError: it wasn't, but failed by itself.
    """
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
    raise TrainingError(f"rank {rank} ended with exit code {failure.exitcode}: {what or 'it said nothing'}")


def _crash_place(store: dist.TCPStore, launch: str, rank: int, logs: str) -> str:
    """Returns where a rank aborted itself; without frames the place that the rank published last; empty if there is none."""
    frames = read_frames(Path(logs), rank)
    if frames and faulthandler.is_enabled():
        sys.stderr.write(frames)  # the rank's own faulthandler wrote to the file
    return find_place(frames) or str(last_place(store, launch, rank) or "")


def _last_line(logs: str, rank: int) -> str:
    """What a rank that isn't the first wrote last, which nobody saw; a list of Python's frames after it doesn't count."""
    files = sorted(Path(logs).glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    text = files[-1].read_text(errors="replace") if files else ""
    lines = text.partition("Fatal Python error")[0].split("\n")
    return next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")
