"""Workers as processes of this machine with `torch.distributed.rpc`; the death of one affects no other.

An elastic agent restarts all workers when one dies, which synchronous training needs. Here the server's process is the
parent of each worker and notices its death.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.rpc import constants

from hotloop.core.hardware.devices import device_names
from hotloop.core.patches import patch_attribute
from hotloop.core.processes import STOP_SIGNALS
from hotloop.distributed.fork_safety import FORK_BYTES, check_process_memory
from hotloop.distributed.watchdog import LONGEST_WAIT_S
from hotloop.errors import HotloopError, TrainingError, describe_error
from hotloop.lowering.parameter_server.scheduler import PollHook, WorkerAnswer, WorkerLost, WorkItem, no_poll
from hotloop.lowering.parameter_server.server import WeightVersion
from hotloop.lowering.parameter_server.workers.worker import RemoteTask, WorkerHost
from hotloop.plan import Plan

_POLL_S = 0.2
"""Interval in seconds at which a waiting server checks its workers."""

_EXIT_WAIT_S = 1.0
"""Longest wait in seconds for the exit of a worker that can't be reached."""

_JOIN_S = 60.0
"""Longest wait in seconds of the server and its workers for each other before the first batch."""


@dataclass(frozen=True)
class _WorkerUnreachable:
    """RPC's error in place of an answer; the text for a dead worker varies."""

    reason: str


class ProcessPool:
    """Worker processes, each with its own replica.

    Args:
        recipe: the remote Task.
        plan: how a worker computes.
        workers: number of workers.

    Raises:
        PlanError: there is too little memory for the processes.
        TrainingError: a process ended before its first batch.
    """

    def __init__(self, recipe: RemoteTask, plan: Plan, workers: int) -> None:
        check_process_memory(workers, FORK_BYTES, "workers")
        self._answers: queue.SimpleQueue[tuple[int, WorkerAnswer | _WorkerUnreachable]] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory(prefix="hotloop-")
        self._processes: dict[int, BaseProcess] = {}
        self._closed = False
        self._turn = rpc._init_counter
        try:
            with _use_loopback():
                self._start(workers)
                self._join_workers(workers)
        except BaseException:
            self._end_processes()
            raise
        self._hosts = [
            rpc.remote(
                _unique_name(worker, self._turn),
                WorkerHost,
                args=(recipe, plan.with_axes(device=worker_device(worker, plan.device, device_names())), workers),
                timeout=0,
            )
            for worker in range(workers)
        ]
        try:
            self._make_ready()
        except BaseException:
            self.close()
            raise

    def submit(self, worker: int, work: WorkItem, weights: WeightVersion) -> None:
        if worker in self._processes:
            self._ask(worker, WorkerHost.gradient, work, weights)

    def receive(self, look: PollHook = no_poll) -> tuple[int, WorkerAnswer]:
        while True:
            try:
                worker, answer = self._answers.get_nowait()
            except queue.Empty:
                if (lost := self._dead_workers()) is not None:
                    return lost
                if not self._processes:
                    raise TrainingError("all workers have ended", fix="see above how each ended") from None
                try:
                    worker, answer = self._answers.get(timeout=_POLL_S)
                except queue.Empty:
                    look()
                    continue
            # other answers of a dead worker don't count
            if worker not in self._processes and not isinstance(answer, WorkerLost):
                continue
            return worker, self._exit_reason(worker, answer) if isinstance(answer, _WorkerUnreachable) else answer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with _use_loopback():
            rpc.shutdown(graceful=False)
        self._end_processes()

    def pids(self) -> dict[int, int]:
        """Returns the process id of each living worker."""
        return {worker: process.pid or 0 for worker, process in self._processes.items()}

    def _start(self, workers: int) -> None:
        context = _spawn_context()
        began: dict[Any, int] = {}
        for worker in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (worker, workers + 1, self._folder.name, self._turn, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"hotloop worker {worker}")
            process.start()
            theirs.close()
            self._processes[worker] = process
            began[ours] = worker
        while began:
            for pipe in wait(list(began)):
                worker = began.pop(pipe)
                assert isinstance(pipe, Connection)
                try:
                    pipe.recv()
                except EOFError:
                    self._processes[worker].join(_EXIT_WAIT_S)
                    raise _start_failure(worker, self._processes[worker].exitcode) from None
                finally:
                    pipe.close()

    def _join_workers(self, workers: int) -> None:
        try:
            _join_rpc(f"server-{self._turn}", 0, workers + 1, self._folder.name, threads=4)
        except RuntimeError as error:
            if (lost := self._dead_workers()) is None:
                raise TrainingError(f"the workers can't be reached: {describe_error(error)}") from error
            raise TrainingError(
                f"worker {lost[0]} {lost[1].reason} before its first batch", fix="start again"
            ) from error

    def _make_ready(self) -> None:
        """Waits until all workers have built their replicas, so that the first epoch's time doesn't include this.

        Raises:
            TrainingError: a replica can't be built, or not all workers have built theirs within the limit.
        """
        deadline = time.monotonic() + LONGEST_WAIT_S

        def check_time() -> None:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"not all workers have built the model within {LONGEST_WAIT_S:.0f}s",
                    fix="find what stops a worker, and start again",
                )

        for worker in range(len(self._hosts)):
            self._ask(worker, WorkerHost.make_ready)
        answers = []
        for _ in self._hosts:
            answers.append(self.receive(check_time))
            if isinstance(error := answers[-1][1], HotloopError):
                raise error
        for answer in answers:
            self._answers.put(answer)

    def _ask(self, worker: int, method: Any, *arguments: Any) -> None:
        def arrived(future: torch.futures.Future[Any]) -> None:
            try:
                self._answers.put((worker, future.value()))
            except RuntimeError as error:
                if "eof" not in str(error).lower() and "shut" not in str(error).lower():  # these mean its death
                    self._answers.put((worker, _WorkerUnreachable(describe_error(error))))

        host = self._hosts[worker]
        try:
            future_answer = rpc.rpc_async(
                _unique_name(worker, self._turn), _call_method, args=(host, method, *arguments), timeout=0
            )
        except RuntimeError as error:  # the worker died before its host was created
            self._answers.put((worker, _WorkerUnreachable(describe_error(error))))
        else:
            future_answer.add_done_callback(arrived)

    def _dead_workers(self) -> tuple[int, WorkerLost] | None:
        for worker, process in self._processes.items():
            if process.exitcode is not None:
                del self._processes[worker]
                return worker, WorkerLost(_describe_exit(process.exitcode))
        return None

    def _exit_reason(self, worker: int, unreached: _WorkerUnreachable) -> WorkerAnswer:
        process = self._processes[worker]
        process.join(_EXIT_WAIT_S)
        if process.exitcode is None:
            return TrainingError(f"worker {worker} can't be reached: {unreached.reason}")
        del self._processes[worker]
        return WorkerLost(_describe_exit(process.exitcode))

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.kill()  # SIGKILL also ends a stopped process
        for process in self._processes.values():
            process.join()
        self._folder.cleanup()


def worker_device(worker: int, device: str, here: Sequence[str]) -> str:
    """Returns the device of a worker: those of the plan's kind in turn.

    Args:
        here: names of this machine's devices.
    """
    alike = [name for name in here if name.partition(":")[0] == device.partition(":")[0]]
    return alike[worker % len(alike)] if len(alike) > 1 else device


def _spawn_context() -> Any:
    """Returns a context for processes that share no state with this one, as CUDA and OpenMP require; a fork server has
    torch loaded.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _call_method(host: Any, method: Any, *arguments: Any) -> Any:
    return method(host.local_value(), *arguments)


def _serve(worker: int, world: int, folder: str, turn: int, began: Connection) -> None:
    """Runs the main thread of a worker process: answers requests until its parent ends.

    Args:
        turn: number of earlier uses of RPC in the server's process; torch numbers its uses, and the numbers must agree.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # these reach all processes of a terminal; the server ends its workers
    watch = threading.Thread(target=_end_with_parent, daemon=True)
    watch.start()
    try:
        began.send(worker)
    except BrokenPipeError:  # the server's process ended meanwhile
        return
    rpc._init_counter = turn
    with suppress(RuntimeError):  # another process hasn't joined: the server reports which, and ends the workers
        # RPC has its own threads for operations
        _join_rpc(_unique_name(worker, turn), worker + 1, world, folder, threads=1)
    watch.join()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join_rpc(name: str, rank: int, world: int, folder: str, *, threads: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=60, init_method=f"file://{folder}/meeting"
    )
    # torch 2.13 waits 24 days for a process that was killed before it joined, and has no option for this time.
    limited = patch_attribute(constants, "DEFAULT_PROCESS_GROUP_TIMEOUT", lambda _: timedelta(seconds=_JOIN_S))
    with limited, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use
        rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


@contextmanager
def _use_loopback() -> Iterator[None]:
    """Sets the loopback interface for RPC, unless the user has set another, and logs of errors only."""
    settings = {"TP_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ours = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _unique_name(worker: int, turn: int) -> str:
    """Returns a name that wasn't used before: torch counts the operations of a set of names in the server's process."""
    return f"worker-{worker}-{turn}"


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _start_failure(worker: int, code: int | None) -> TrainingError:
    if code is not None and code < 0:
        return TrainingError(f"worker {worker} {_describe_exit(code)} before its first batch", fix="start again")
    return TrainingError(
        f"the process of worker {worker} ended before it began",
        expected="a script that starts to train only if it is the main program",
        fix='put the call under `if __name__ == "__main__":`, since each worker imports the script',
    )
