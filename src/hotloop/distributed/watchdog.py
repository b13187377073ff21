"""Watches the ranks: ends a rank that waits too long for others, and reports where each rank is, and ranks without heartbeat.

The threads run while the main thread waits in C++: torch releases Python's lock there.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hotloop.core.processes import STOP_SIGNALS
from hotloop.errors import TrainingError, is_library_file


@dataclass
class RankProgress:
    """The progress of one process, which has one training run at a time.

    Attributes:
        phase: `start`, `training`, `evaluation`, `checkpoint`, `callbacks` or `end`.
        step: number of the current or last step, from 0.
        steps: number of steps that this process has begun.
        batches: number of evaluation batches that this process has begun.
        longest_s: seconds of the longest step with the wait for its batch; 0 before the first step ends.
    """

    phase: str = "start"
    step: int = 0
    steps: int = 0
    batches: int = 0
    longest_s: float = 0.0
    _began: float = 0.0

    def begin_step(self, number: int) -> None:
        """Records the begin of a step and the duration of the step before."""
        now = time.monotonic()
        if self.phase == "training" and self.steps and number == self.step + 1:
            self.longest_s = max(self.longest_s, now - self._began)
        self.phase, self.step, self._began = "training", number, now
        self.steps += 1

    def begin_batch(self) -> None:
        """Records the begin of an evaluation batch."""
        self.batches += 1

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Records a phase within the context, or within each call as a decorator."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase, self._began = before, time.monotonic()  # the step's time excludes the phase


RANK_PROGRESS = RankProgress()


LONGEST_WAIT_S = 1800.0
"""Longest wait while another rank starts, writes a checkpoint or calls callbacks; torch's default timeout of gloo."""

_LEAST_WAIT_S = 60.0
_TIMED_STEPS = 20
"""Without the user's own limit, ranks wait for each other for this multiple of the longest step."""

_EVERY_S = 0.5
"""Time between two checks; each check publishes the rank's place."""
_SIGNAL_WAIT_S = 6.0
"""Longest wait of ranks for each other after a signal; all ranks must end within 10 s."""
_ORPHAN_S = 2.0
"""Time to save and stop for a rank whose parent process was killed."""
_ORPHAN_WRITES_S = 30.0
"""The same for a rank that writes a checkpoint when its parent process is killed."""
_SILENT_S = 3.0
"""A rank without a newly published place for this time is stopped or has ended."""

_JOINT_PHASES = ("training", "evaluation")
"""Phases in which all ranks compute. In other phases one rank may work while the others wait."""

_RECORDED_COLLECTIVES = 64


@contextmanager
def _run_beside(over: threading.Event, *loops: Callable[[], None]) -> Iterator[None]:
    """Runs each loop in a thread within the context; sets `over` at the end, and waits for the threads."""
    threads = [threading.Thread(target=loop, name="hotloop-watchdog", daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank in its training.

    Attributes:
        phase, step, steps, batches: see `Progress`.
        operation: the collective operation that the rank waits for, such as `all_gather, operation 57`; empty if none.
        newest: the number of the collective operation that began last; -1 if none began.
        line: the innermost running line of the user's code, such as `task.py:33`; empty if none runs.
        signalled: the number of the received stop signal; 0 without a signal.
    """

    phase: str
    step: int
    steps: int
    batches: int
    operation: str
    newest: int
    line: str
    signalled: int

    def __str__(self) -> str:
        where = self.operation or "no collective operation"
        at = f", {self.line}" if self.line else ""
        return f"in {where} ({self.phase}, step {self.step}{at})"

    @property
    def is_waiting(self) -> bool:
        return bool(self.operation)

    @property
    def progress(self) -> tuple[Any, ...]:
        return self.phase, self.step, self.steps, self.batches, self.operation, self.newest


class Watchdog:
    """Limits the waits of one rank for other ranks.

    Args:
        store: a store that only the watchdog's thread uses.
        launch: the name of the set of processes.
        rank: the number of this rank.
        ranks: the number of ranks.
        limit_s: the longest wait of ranks for each other; None derives the limit from the longest step.
        end: ends the process with the error and the exit code.
    """

    def __init__(
        self,
        store: dist.Store,
        launch: str,
        rank: int,
        ranks: int,
        limit_s: float | None,
        end: Callable[[TrainingError, int], None],
    ) -> None:
        self._store, self._launch, self._rank, self._ranks = store, launch, rank, ranks
        self._limit_s, self._end = limit_s, end
        self._main = threading.main_thread().ident
        self._parent = os.getppid()
        self._is_over = threading.Event()
        self._signals: socket.socket | None = None
        self._signalled = 0
        self._orphaned_at = math.inf
        self._place: RankPlace | None = None
        self._since, self._checked_at = 0.0, math.inf
        self._others: dict[int, tuple[str, float]] = {}
        self._checks = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Runs two threads within the context: one uses the store, whose calls may hang; the other works without it."""
        with self._receive_signals(), _run_beside(self._is_over, self._check_ranks, self._check_parent):
            yield

    @contextmanager
    def _receive_signals(self) -> Iterator[None]:
        """Receives signal numbers at once; Python's handlers wait until the main thread returns from C++."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._signals, written = socket.socketpair()
        self._signals.setblocking(False)
        written.setblocking(False)
        os.register_at_fork(after_in_child=self._leave_signals)
        before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            signals, self._signals = self._signals, None
            signals.close()
            written.close()

    def _leave_signals(self) -> None:
        """Ignores signals in a fork, such as a worker of a pool: these aren't signals to the rank."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)

    def _check_parent(self) -> None:
        """Reads signals, and ends the process a few seconds after its parent process was killed."""
        while not self._is_over.wait(_EVERY_S):
            self._read_signals()
            now = time.monotonic()
            if self._orphaned_at == math.inf and os.getppid() != self._parent:
                self._orphaned_at = now
                os.kill(os.getpid(), signal.SIGTERM)  # the rank saves and stops if the other ranks respond
            limit_s = _ORPHAN_WRITES_S if RANK_PROGRESS.phase == "checkpoint" else _ORPHAN_S
            if now - self._orphaned_at > limit_s:
                os._exit(128 + signal.SIGTERM)

    def _read_signals(self) -> None:
        if self._signals is None:
            return
        with suppress(BlockingIOError):  # no signal
            for number in self._signals.recv(64):
                if number in STOP_SIGNALS and not self._signalled:
                    self._signalled = number

    def _check_ranks(self) -> None:
        with suppress(RuntimeError):  # the process of the store has ended
            while not self._is_over.wait(_EVERY_S):
                self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Publishes the place of this rank; ends the process after too long a wait.

        Args:
            now: the time in seconds of `time.monotonic()`.
        """
        place = self._current_place()
        self._checks += 1
        self._store.set(self._key(self._rank), json.dumps([self._checks, asdict(place)]))
        if now - self._checked_at > _SILENT_S:  # this process or the store's was stopped, as by Ctrl-Z: no rank is late
            self._since += now - self._checked_at
        self._checked_at = now
        if self._place is None or place.progress != self._place.progress:
            self._place, self._since = place, now
            return
        self._place = place
        waited_s = now - self._since
        if waited_s < min(2.0, self._limit_s or math.inf):
            return
        others = self._read_others(now)
        if not place.is_waiting and not self._stop_number(others):
            return
        limit_s = self._limit(others)
        if waited_s > limit_s:
            self._give_up(waited_s, others)

    def _current_place(self) -> RankPlace:
        operation, newest = self._operation()
        frame = sys._current_frames().get(self._main or 0)
        return RankPlace(
            RANK_PROGRESS.phase,
            RANK_PROGRESS.step,
            RANK_PROGRESS.steps,
            RANK_PROGRESS.batches,
            operation or _waiting_function(frame),
            newest,
            _user_line(frame),
            self._signalled,
        )

    def _operation(self) -> tuple[str, int]:
        """Returns the oldest collective operation that hasn't ended, and the number of the newest operation."""
        dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # torch's flight recorder, oldest first
        entries = [] if dump is None else json.loads(dump(True, False)).get("entries", [])
        waiting = next((entry for entry in entries if not entry["retired"]), None)
        newest = max((entry["record_id"] for entry in entries), default=-1)
        if waiting is None:
            return "", newest
        number = waiting["p2p_seq_id"] if waiting.get("is_p2p") else waiting["collective_seq_id"]
        return f"{waiting['profiling_name'].rpartition(':')[2]}, operation {number}", newest

    def _read_others(self, now: float) -> dict[int, RankPlace | None]:
        """Returns the places of the other ranks; None for a rank that no longer writes its place."""
        places: dict[int, RankPlace | None] = {}
        for rank in range(self._ranks):
            if rank == self._rank:
                continue
            key = self._key(rank)
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            if rank not in self._others or self._others[rank][0] != text:
                self._others[rank] = text, now
            silent = not text or now - self._others[rank][1] > _SILENT_S
            places[rank] = None if silent else RankPlace(**json.loads(text)[1])
        return places

    def _limit(self, others: dict[int, RankPlace | None]) -> float:
        busy = [place for place in others.values() if place is not None and not place.is_waiting]
        if any(place.phase not in _JOINT_PHASES or not place.steps for place in busy):
            return max(LONGEST_WAIT_S, self._limit_s or 0.0)
        step_s = RANK_PROGRESS.longest_s
        limit_s = self._limit_s or default_limit_s(step_s)
        if self._stop_number(others):
            limit_s = min(limit_s, max(_SIGNAL_WAIT_S, 2 * step_s) if busy else _SIGNAL_WAIT_S)
        return limit_s

    def _stop_number(self, others: dict[int, RankPlace | None]) -> int:
        """Returns the number of the signal that any rank received; 0 without a signal."""
        return max([self._signalled, *(place.signalled for place in others.values() if place is not None)])

    def _give_up(self, waited_s: float, others: dict[int, RankPlace | None]) -> None:
        number = self._stop_number(others)
        places = others | {self._rank: self._place}
        each = [f"rank {rank} {places[rank] or 'gives no sign of life'}" for rank in range(self._ranks)]
        waits = f"the ranks have waited {waited_s:.0f}s for each other: {'; '.join(each)}"
        self._store.set(ended_key(self._launch), "1")
        if number:
            name = signal.Signals(number).name
            self._end(
                TrainingError(f"stopped ({name}) without saving, the last checkpoint stays: {waits}"), 128 + number
            )
        else:
            self._end(
                TrainingError(
                    waits,
                    expected="the same collective operations on each rank",
                    fix="find what only some ranks do; --rank-timeout makes them wait longer; continue with --resume",
                ),
                1,
            )

    def _key(self, rank: int) -> str:
        return _place_key(self._launch, rank)


def default_limit_s(step_s: float) -> float:
    """Returns how long ranks wait for each other without the user's own limit, in seconds.

    Args:
        step_s: the duration of the longest step so far, in seconds.
    """
    return min(LONGEST_WAIT_S, max(_LEAST_WAIT_S, _TIMED_STEPS * step_s))


def last_place(store: dist.Store, launch: str, rank: int) -> RankPlace | None:
    key = _place_key(launch, rank)
    return RankPlace(**json.loads(store.get(key))[1]) if store.check([key]) else None


def _place_key(launch: str, rank: int) -> str:
    return f"hotloop/place/{launch}/{rank}"


def ended_key(launch: str) -> str:
    """Returns the store's key that a watchdog sets before it ends its rank."""
    return f"hotloop/ended/{launch}"


def record_collectives() -> None:
    """Makes torch's flight recorder store collective operations; to be called before the process group exists."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_RECORDED_COLLECTIVES))


def _waiting_function(frame: FrameType | None) -> str:
    """Returns the running function of torch.distributed; the flight recorder lacks sends and receives."""
    for _ in range(3):
        if frame is None:
            return ""
        if "/torch/distributed/" in frame.f_code.co_filename:
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


def _user_line(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if is_user_code(path):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_BEAT_S = 1.0
_NO_BEAT_S = 4.0
"""A rank without a heartbeat for this time is stopped, or its machine fails."""


_OBSERVATION_S = 3 * _BEAT_S
"""Each live rank sends a heartbeat within this time."""

_LEFT = "over"
"""Last heartbeat of a rank that leaves."""


class Heartbeat:
    """Sends the heartbeat of one rank, and reads those of the others.

    Args:
        store: a store that only this object's thread uses.
        launch: name of the set of processes, which keeps the heartbeats of an earlier set apart.
        tell: reports ranks that become silent, or go on.
    """

    def __init__(self, store: dist.Store, launch: str, rank: int, ranks: int, tell: Callable[[str], None]) -> None:
        self._store, self._launch, self._rank, self._ranks, self._tell = store, launch, rank, ranks, tell
        self._last_beats: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()
        self._over = threading.Event()

    @contextmanager
    def beat(self) -> Iterator[None]:
        """Sends heartbeats in a thread within the context; the first at once, since a rank may be stopped soon."""
        self._store.set(self._key(self._rank), "0")
        try:
            with _run_beside(self._over, self._beat):
                yield
        finally:
            with suppress(RuntimeError):  # the store may have ended
                self._store.set(self._key(self._rank), _LEFT)

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store has ended
            while not self._over.wait(_BEAT_S):
                count += 1
                self._store.set(self._key(self._rank), str(count))
                self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Reads all heartbeats and reports changes; `now` in seconds."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            beat = _read_beat(self._store, self._key(rank))
            if rank not in self._last_beats or self._last_beats[rank][0] != beat:
                self._last_beats[rank] = beat, now
        silent = {rank for rank in others if now - self._last_beats[rank][1] > _NO_BEAT_S}
        if all(rank in silent for rank in range(self._rank)):  # else an earlier rank reports
            self._report_changes(silent, now)
        self._silent = silent

    def _report_changes(self, silent: set[int], now: float) -> None:
        for rank in sorted(silent - self._silent):
            seconds = now - self._last_beats[rank][1]
            self._tell(f"waiting for rank {rank}: no sign of life for {seconds:.0f}s")
        for rank in sorted(self._silent - silent):
            self._tell(f"rank {rank} continues")

    def _key(self, rank: int) -> str:
        return _beat_key(self._launch, rank)


class LaunchWatch:
    """Watches the heartbeat of rank 0 from the launcher: no rank reports on rank 0, nor on ranks that never began.

    Args:
        store: a store that only this object's thread uses.
        launch: name of the set of processes.
        tell: reports that rank 0 becomes silent or goes on, and that a process is stopped while the ranks start.
        kill: kills ranks that still run after a watchdog has ended another rank.
    """

    def __init__(
        self, store: dist.Store, launch: str, tell: Callable[[str], None], kill: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._key, self._tell, self._kill = store, _beat_key(launch, 0), tell, kill
        self._ended_key = ended_key(launch)
        self._beat, self._since, self._silent = "", 0.0, False
        self._stopped_at: dict[int, float] = {}
        self._over = threading.Event()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Reads the heartbeat each second in a thread within the context."""
        with _run_beside(self._over, self._watch):
            yield

    def _watch(self) -> None:
        while not self._over.wait(_BEAT_S):
            self.check(time.monotonic())
            if self._store.check([self._ended_key]) and not self._over.wait(_BEAT_S):
                self._kill()

    def check(self, now: float) -> None:
        """Reads the heartbeat and reports a change; `now` in seconds. A rank 0 that still starts isn't silent."""
        beat = _read_beat(self._store, self._key)
        if beat == "":
            self._report_stopped(now)
        if beat != self._beat:
            self._beat, self._since = beat, now
        silent = beat not in ("", _LEFT) and now - self._since > _NO_BEAT_S
        if silent and not self._silent:
            self._tell(f"waiting for rank 0: no sign of life for {now - self._since:.0f}s")
        elif self._silent and not silent:
            self._tell("rank 0 continues")
        self._silent = silent

    def _report_stopped(self, now: float) -> None:
        """Reports a rank whose process is stopped, as by SIGSTOP, before the ranks have found each other."""
        stopped = {one.pid for one in psutil.Process().children() if _is_stopped(one)}
        self._stopped_at = {pid: self._stopped_at.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_at.items():
            if now - since > _NO_BEAT_S:
                self._stopped_at[pid] = math.inf  # reported once
                self._tell(f"waiting for a rank that is stopped: kill -CONT {pid} lets its process continue")


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False


def silent_ranks(store: dist.Store, launch: str, ranks: int) -> list[int]:
    """Observes the heartbeats for some seconds; returns the ranks that sent none and haven't left."""

    def signs() -> list[str]:
        return [_read_beat(store, _beat_key(launch, rank)) for rank in range(ranks)]

    before = signs()
    time.sleep(_OBSERVATION_S)
    return [rank for rank, (then, now) in enumerate(zip(before, signs(), strict=True)) if then == now != _LEFT]


def _read_beat(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _beat_key(launch: str, rank: int) -> str:
    return f"hotloop/beat/{launch}/{rank}"


_FRAMES_FILE = "frames.txt"
"""File with a rank's frames, beside the error file of torch's agent."""


@contextmanager
def recording_frames() -> Iterator[None]:
    """Within the context, a fatal signal writes the frames of all threads into the folder of torch's agent, if any."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        yield
        return
    was_enabled = faulthandler.is_enabled()
    with Path(error_file).with_name(_FRAMES_FILE).open("w") as file:
        file.write(f"main thread: 0x{threading.main_thread().ident:016x}\n")
        file.flush()
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable()


def read_frames(folder: Path, rank: int) -> str:
    """Returns the frames that a rank wrote last; empty if the rank wrote none.

    Args:
        folder: the log folder of torch's agent, in which rank r of each start has `*/attempt_*/r`.
    """
    files = sorted(folder.glob(f"*/attempt_*/{rank}/{_FRAMES_FILE}"), key=lambda file: file.stat().st_mtime)
    text = files[-1].read_text(errors="replace") if files else ""
    return text if "Fatal Python error" in text else ""


def find_place(frames: str) -> str:
    """Returns the place of the main thread, such as `in all_reduce (task.py:33)`; empty outside the user's code."""
    main = re.match("main thread: (0x[0-9a-f]+)", frames)
    threads = re.split(r"^(?:Current thread|Thread) ", frames, flags=re.MULTILINE)
    main_text = next((text for text in threads if main and text.startswith(main[1])), "")
    places = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main_text, flags=re.MULTILINE)
    operation = next((function for path, _, function in places[:3] if "/torch/distributed/" in path), "")
    line = next((f"{Path(path).name}:{number}" for path, number, _ in places if is_user_code(path)), "")
    return f"in {operation or 'no collective operation'} ({line})" if line else ""


def is_user_code(path: str) -> bool:
    return path.endswith(".py") and not is_library_file(path)
